// The page: reads facts.json, runs the models through worker.js, and draws their results.

import { h, roving, visible } from "./elements.js";
import { headScores } from "./scores.js";
import { drawStory } from "./story.js";
import { Tokenizer, differing } from "./tokenizer.js";
import { coefficientColors, ModelView } from "./views.js";

const TOP = 8; // number of most likely next tokens that are shown
const SLOW = 20e6; // number of parameters from which on scores are measured again only on request

const $ = (id) => document.getElementById(id);

const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
worker.onmessage = ({ data: { call, result, error } }) => {
  const { resolve, reject } = waiting.get(call);
  waiting.delete(call);
  if (error === undefined) resolve(result);
  else reject(new Error(error));
};
worker.onerror = (event) => say(`The runtime could not be started: ${event.message ?? "see the console"}`, true);

function ask(method, values) {
  const call = ask.calls;
  ask.calls += 1;
  return new Promise((resolve, reject) => {
    waiting.set(call, { resolve, reject });
    worker.postMessage({ call, method, values });
  });
}
ask.calls = 0;

let [facts, tokenizer, models] = [null, null, []];
let [tokens, query, pointed, color] = [[], 0, null, "induction"];
let wanted = 0; // number of the newest requested computation
let busy = false;
let stale = new Set(); // models whose coefficients have changed since their scores were measured

function say(text, isWrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", isWrong);
}

const tokenText = (id) => tokenizer.text(id);

async function start() {
  say("");
  facts = await (await fetch("facts.json")).json();
  models = facts.models.map(makeModel);
  $("version").textContent = facts.version;
  const names = facts.models.map(({ name }) => name).join(" and ");
  document.title = facts.explain ? "How one layer learns to copy · kvshift" : `${names} · kvshift`;
  if (facts.explain) {
    document.body.classList.add("explain");
    $("plain-header").hidden = true;
    for (const id of ["lesson-header", "lesson", "left-out", "figure", "own-model"]) $(id).hidden = false;
  }
  $("models").classList.toggle("two", models.length > 1);
  $("models").replaceChildren(...models.map(({ view }) => view.element));
  $("stories").replaceChildren(...models.map((model) => (model.story = h("div", { className: "story" }, h("h2", {}, model.facts.name)))));
  for (const [value, text] of coefficientColors(facts.models)) $("color").append(h("option", { value }, text));
  $("examples").replaceChildren(
    ...facts.examples.map((text) => h("button", { type: "button", onclick: () => setText(text) }, text)),
  );
  $("text").value = facts.text;
  $("text").addEventListener("input", readText);
  $("color").addEventListener("change", () => {
    color = $("color").value;
    draw();
  });
  $("amount").addEventListener("input", dial);
  addEventListener("resize", draw);
  const file = await (await fetch("tokenizer.json")).json();
  tokenizer = new Tokenizer(file);
  const text = differing(tokenizer, file.sample);
  if (text !== undefined) throw new Error(`this browser splits ${JSON.stringify(text)} into other tokens than the model's tokenizer`);
  readText();
  const megabytes = facts.models.reduce((sum, { files }) => sum + Object.values(files).reduce((a, b) => a + b, 0), 0) / 1e6;
  say(`Loading the ${models.length > 1 ? "models" : "model"} (${megabytes.toFixed(megabytes < 10 ? 1 : 0)} MB) and the runtime (14 MB) …`);
  const loading = performance.now();
  for (const { number } of models) {
    const data = Object.keys(facts.models[number].files).find((name) => name.endsWith(".data"));
    await ask("load", { number, url: `models/${number}/model.onnx`, data });
  }
  document.body.dataset.loaded = String(Math.round(performance.now() - loading));
  models.forEach((model) => (model.isLoaded = true));
  compute();
}

function makeModel(of, number) {
  const scores = Array.from({ length: of.layers }, () => []);
  for (const { layer, head, moved, alone } of of.scores) {
    scores[layer][head] = { induction: moved["earlier+1"], previous: moved.previous, duplicate: moved.earlier, alone };
  }
  const model = { facts: { ...of, id: `model-${number}`, slow: of.parameters > SLOW }, number, scores, accuracy: of.accuracy };
  model.learnedScores = scores;
  model.learned = of.coefficients;
  model.coefficients = structuredClone(of.coefficients);
  model.chosen = { layer: 0, head: 0 };
  scores.forEach((heads, layer) =>
    heads.forEach((score, head) => {
      const { layer: l, head: h } = model.chosen;
      if (score.induction > scores[l][h].induction) model.chosen = { layer, head };
    }),
  );
  model.view = new ModelView(model.facts, {
    onHead: (layer, head) => {
      model.chosen = { layer, head };
      model.view.drawSliders(stateOf(model));
      model.view.draw(stateOf(model));
    },
    onCoefficients: (name, place, lag, value) => setCoefficients(model, name, place, lag, value),
    onMeasure: () => measure(model),
    tokenText,
  });
  return model;
}

function setText(text) {
  $("text").value = text;
  readText();
}

function readText() {
  let ids;
  try {
    ids = tokenizer.encode($("text").value);
  } catch (error) {
    say(error.message, true);
    return;
  }
  const spaces = $("text").value.match(/\s/g)?.length ?? 0;
  const left = spaces ? `; ${spaces} ${spaces === 1 ? "space is" : "spaces are"} left out` : "";
  $("left-out").textContent = `Each letter is a token${left}.`;
  const most = Math.min(...facts.models.map((model) => model.tokens));
  const cut = ids.length > most;
  tokens = ids.slice(0, most).map((id) => ({ id }));
  query = tokens.length - 1;
  pointed = null;
  for (const model of models) model.result = null;
  drawTokens();
  if (facts.explain) $("figure").hidden = !ids.length;
  if (!ids.length) draw();
  if (cut) say(`Only the first ${most} of ${ids.length} tokens are computed.`, true);
  else if (!ids.length) say("Type something.");
  else if (facts.explain && ids.some((id) => tokenizer.texts.get(id) === tokenizer.model.unk_token)) {
    say("These models know letters, digits, + and /; they have never seen what is written as <unk>.", true);
  } else if (models.every((model) => model.isLoaded)) say("");
  compute();
}

// Compute the text with every model. While one computation runs, only the newest request waits.
async function compute() {
  wanted += 1;
  if (busy || !models.every((model) => model.isLoaded)) return;
  busy = true;
  try {
    for (let done = 0; done !== wanted; ) {
      done = wanted;
      const ids = tokens.map(({ id }) => id);
      if (!ids.length) continue;
      const results = [];
      for (const { number, coefficients } of models) results.push(await ask("run", { number, ids, coefficients, top: TOP }));
      if (done !== wanted) continue;
      models.forEach((model, number) => (model.result = results[number]));
      const times = results.map(({ milliseconds }, number) => {
        const whose = models.length > 1 ? ` (${models[number].facts.name})` : "";
        return `${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms${whose}`;
      }).join(" and ");
      if (!$("status").classList.contains("wrong")) say(`${ids.length} tokens computed in ${times}.`);
      document.body.dataset.computed = String(done);
      draw();
      for (const model of stale) if (!model.facts.slow && done === wanted) await measure(model);
    }
  } catch (error) {
    say(`The model could not be computed: ${error.message}`, true);
  } finally {
    busy = false;
  }
}

// Measure the scores of the heads and the accuracy of the model on its repeated sequences.
async function measure(model) {
  stale.delete(model);
  const { length, rows } = model.facts.repeats;
  const { heads } = model.facts;
  const [sums, hits] = [[], []];
  for (const ids of rows) {
    const { attention, next } = await ask("run", { number: model.number, ids, coefficients: model.coefficients, top: 1 });
    attention.forEach((layer, index) => {
      const { alpha, beta } = model.coefficients[index] ?? {};
      const found = headScores(layer, { heads, length, alpha, beta });
      sums[index] ??= found.map(() => ({ induction: 0, previous: 0, duplicate: 0, alone: 0 }));
      found.forEach((score, head) => {
        for (const name of Object.keys(score)) sums[index][head][name] += score[name] / rows.length;
      });
    });
    for (let t = ids.length - length; t + 1 < ids.length; t += 1) hits.push(Number(next[t].tokens[0].id === ids[t + 1]));
  }
  model.scores = sums;
  model.accuracy = hits.reduce((a, b) => a + b, 0) / hits.length;
  draw();
}

// Set one coefficient of one KV head, or of all heads without `place`. Without `name`, restore the learned values.
function setCoefficients(model, name, place, lag, value) {
  if (name === undefined) {
    model.coefficients = structuredClone(model.learned);
    if (model.learned.length) {
      $("amount").value = 100;
      $("amount-value").textContent = "100 % of what was learned";
    }
    model.view.drawSliders(stateOf(model));
  } else {
    model.coefficients.forEach((layer, number) =>
      layer[name].forEach((lags, head) => {
        if (!place || (place.layer === number && place.head === head)) lags[lag] = value;
      }),
    );
  }
  stale.add(model);
  compute();
}

// The slider of the explanation: set alpha_2 of all heads to a fraction of its learned value.
function dial() {
  const part = Number($("amount").value) / 100;
  $("amount-value").textContent = `${$("amount").value} % of what was learned`;
  for (const model of models) {
    if (!model.learned.length) continue;
    model.coefficients.forEach((layer, number) =>
      layer.alpha.forEach((lags, head) => {
        lags[1] = part * model.learned[number].alpha[head][1];
      }),
    );
    model.view.drawSliders(stateOf(model));
    stale.add(model);
  }
  compute();
}

function stateOf(model) {
  const { chosen, coefficients, scores, accuracy, result, facts: of } = model;
  return { facts: of, tokens, query: pointed ?? query, chosen, coefficients, scores, accuracy, result, color };
}

function draw() {
  for (const model of models) {
    if (!model.hasSliders) model.view.drawSliders(stateOf(model));
    model.hasSliders = true;
    model.view.draw(stateOf(model));
    if (facts.explain && model.result) {
      drawStory(model.story, { ...stateOf(model), scores: model.learnedScores }, tokenText);
    }
  }
}

function drawTokens() {
  const choose = (index) => {
    query = index;
    roveTokens();
    draw();
  };
  const point = (index) => {
    pointed = index;
    draw();
  };
  $("tokens").replaceChildren(
    ...tokens.map(({ id }, index) =>
      h(
        "button",
        {
          type: "button",
          role: "radio",
          "aria-label": `${visible(tokenText(id))}, token ${index + 1} of ${tokens.length}`,
          onclick: () => choose(index),
          onpointerenter: (event) => event.pointerType === "mouse" && point(index),
          onpointerleave: () => point(null),
        },
        visible(tokenText(id)),
      ),
    ),
  );
  const roveTokens = () => roving($("tokens"), query, 0, choose);
  roveTokens();
}

// An interface for the browser's console and for tests.
globalThis.explorer = {
  isSettled: () => models.length > 0 && models.every((model) => model.isLoaded) && !busy && stale.size === 0,
  tokens: () => tokens.map(({ id }) => id),
  query: () => query,
  chosen: (number) => models[number].chosen,
  scores: (number) => models[number].scores,
  result: (number) => {
    const { next, attention } = models[number].result;
    return { next, attention: attention.map((layer) => [...layer]) };
  },
};

start().catch((error) => say(`The page could not be loaded: ${error.message}`, true));
