// Runs the models in a worker, so that the page stays responsive.
// Messages: {call, method, values} -> {call, result} or {call, error}.

import * as ort from "./runtime/ort.wasm.min.mjs";

ort.env.wasm.numThreads = 1; // more threads need server headers that a static page cannot rely on
ort.env.wasm.wasmPaths = new URL("./runtime/", import.meta.url).href;
ort.env.logLevel = "error";

const sessions = [];

const bytes = async (url) => {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url}: ${answer.status} ${answer.statusText}`);
  return new Uint8Array(await answer.arrayBuffer());
};

// Load the model with index `number`; `data` is the file with its weights beside the program, if there is one.
async function load({ number, url, data }) {
  const options = { executionProviders: ["wasm"], logSeverityLevel: 3 };
  if (data) options.externalData = [{ path: data, data: await bytes(new URL(data, new URL(url, import.meta.url))) }];
  sessions[number] = await ort.InferenceSession.create(await bytes(new URL(url, import.meta.url)), options);
}

// Run a model on a sequence. Returns, for each position, the `top` most likely next tokens and the probability of the
// actual next token; and for each layer the attention [head][query][key] in one array.
async function run({ number, ids, coefficients, top }) {
  const started = performance.now();
  const inputs = { input_ids: new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]) };
  coefficients.forEach((layer, index) => {
    for (const [name, heads] of Object.entries(layer)) {
      const shape = [heads.length, heads[0].length];
      inputs[`coefficients.${index}.${name}`] = new ort.Tensor("float32", Float32Array.from(heads.flat()), shape);
    }
  });
  const outputs = await sessions[number].run(inputs);
  const vocabulary = outputs.logits.dims[2];
  const next = ids.map((_, t) => likeliest(outputs.logits.data.subarray(t * vocabulary, (t + 1) * vocabulary), ids[t + 1], top));
  const layers = Object.keys(outputs).length - 1;
  const attention = Array.from({ length: layers }, (_, layer) => Float32Array.from(outputs[`attention.${layer}`].data));
  for (const tensor of Object.values(outputs)) tensor.dispose();
  return { next, attention, milliseconds: performance.now() - started };
}

// The `top` most likely tokens of softmax(logits), and the probability of the token `actual`.
function likeliest(logits, actual, top) {
  let largest = -Infinity;
  for (const logit of logits) if (logit > largest) largest = logit;
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - largest);
  const probability = (id) => Math.exp(logits[id] - largest) / sum;
  const best = [];
  for (let id = 0; id < logits.length; id += 1) {
    if (best.length === top && logits[id] <= logits[best[top - 1]]) continue;
    let place = best.length;
    while (place > 0 && logits[id] > logits[best[place - 1]]) place -= 1;
    best.splice(place, 0, id);
    if (best.length > top) best.pop();
  }
  const tokens = best.map((id) => ({ id, probability: probability(id) }));
  return { tokens, actual: actual === undefined ? null : probability(actual) };
}

const methods = { load, run };

onmessage = async ({ data: { call, method, values } }) => {
  try {
    const result = await methods[method](values);
    postMessage({ call, result }, result ? result.attention.map((layer) => layer.buffer) : []);
  } catch (error) {
    postMessage({ call, error: String(error?.message ?? error) });
  }
};
