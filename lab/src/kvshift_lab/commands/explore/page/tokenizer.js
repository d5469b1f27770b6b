// Runs a tokenizer.json of Hugging Face's library `tokenizers` like the library: byte-level BPE and word lists.
// `page_tokenizer.py` refuses tokenizers that are not supported here.

const SPACE = /^\p{White_Space}$/u;

export class Tokenizer {
  constructor(file) {
    const { model } = file;
    this.vocabulary = new Map(Object.entries(model.vocab));
    this.texts = new Map([...this.vocabulary].map(([text, id]) => [id, text]));
    this.added = file.added_tokens ?? [];
    this.special = new Set(this.added.map((token) => token.id));
    for (const token of this.added) this.texts.set(token.id, token.content);
    this.isBytes = model.type === "BPE";
    this.model = model;
    this.ranks = new Map((model.merges ?? []).map((pair, rank) => [Array.isArray(pair) ? pair.join(" ") : pair, rank]));
    this.normalizers = steps(file.normalizer, "normalizers").map((step) => step.type);
    this.splits = steps(file.pre_tokenizer, "pretokenizers").map(splitter);
    this.template = steps(file.post_processor, "processors").find((step) => step.type === "TemplateProcessing");
    this.words = new Map();
  }

  // The token ids of a text, including special tokens that the template adds.
  encode(text) {
    const ids = [];
    for (const part of this.#withAdded(text)) {
      if (typeof part === "number") ids.push(part);
      else ids.push(...this.#encodePlain(part));
    }
    if (!this.template) return ids;
    return this.template.single.flatMap((part) =>
      part.Sequence ? ids : this.template.special_tokens[part.SpecialToken.id].ids,
    );
  }

  // The text of a token for display; bytes that do not form complete characters are written in hexadecimal.
  text(id) {
    const text = this.texts.get(id) ?? `[${id}]`;
    if (!this.isBytes || this.special.has(id)) return text;
    const bytes = Uint8Array.from([...text], (character) => BYTES.get(character));
    try {
      return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    } catch {
      return `⟨${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}⟩`;
    }
  }

  // Yield the ids of added tokens, and the texts between them.
  *#withAdded(text) {
    let start = 0;
    for (let at = 0; at < text.length; ) {
      const found = this.added
        .filter((token) => token.content && text.startsWith(token.content, at))
        .reduce((best, token) => (best && best.content.length >= token.content.length ? best : token), undefined);
      if (!found) {
        at += 1;
        continue;
      }
      let [before, after] = [at, at + found.content.length];
      while (found.lstrip && before > start && SPACE.test(text[before - 1])) before -= 1;
      while (found.rstrip && after < text.length && SPACE.test(text[after])) after += 1;
      if (before > start) yield text.slice(start, before);
      yield found.id;
      at = start = after;
    }
    if (start < text.length) yield text.slice(start);
  }

  #encodePlain(text) {
    for (const form of this.normalizers) text = text.normalize(form);
    let pieces = [text];
    for (const split of this.splits) pieces = pieces.flatMap(split);
    return pieces.flatMap((piece) => (this.isBytes ? this.#bpe(piece) : this.#word(piece)));
  }

  #word(piece) {
    const id = this.vocabulary.get(piece) ?? this.vocabulary.get(this.model.unk_token);
    if (id === undefined) throw new Error(`the tokenizer has no token for ${JSON.stringify(piece)}`);
    return [id];
  }

  // Repeatedly merge the pair of lowest rank, the leftmost of equal ones, until no pair has a rank.
  #bpe(piece) {
    const word = [...new TextEncoder().encode(piece)].map((byte) => CHARACTERS[byte]).join("");
    let ids = this.words.get(word);
    if (ids) return ids;
    let symbols = [...word];
    if (this.model.ignore_merges && this.vocabulary.has(word)) symbols = [word];
    while (symbols.length > 1) {
      let [best, at] = [Infinity, -1];
      for (let i = 0; i + 1 < symbols.length; i += 1) {
        const rank = this.ranks.get(`${symbols[i]} ${symbols[i + 1]}`) ?? Infinity;
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) break;
      symbols.splice(at, 2, symbols[at] + symbols[at + 1]);
    }
    ids = symbols.map((symbol) => this.vocabulary.get(symbol)).filter((id) => id !== undefined);
    this.words.set(word, ids);
    return ids;
  }
}

// GPT-2's characters for bytes: printable bytes map to themselves, the others to characters from 256 on.
const CHARACTERS = (() => {
  const isPrintable = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : next++));
})();
const BYTES = new Map(CHARACTERS.map((character, byte) => [character, byte]));

function steps(part, name) {
  if (!part) return [];
  return part.type === "Sequence" ? part[name].flatMap((inner) => steps(inner, name)) : [part];
}

// Return a function that splits a piece of text into several, for a step of the pre-tokenizer.
function splitter(step) {
  switch (step.type) {
    case "ByteLevel": {
      const prefixed = (piece) => (step.add_prefix_space && !piece.startsWith(" ") ? ` ${piece}` : piece);
      if (!step.JavaScript) return (piece) => [prefixed(piece)];
      const pattern = new RegExp(step.JavaScript, "gu");
      return (piece) => parts(prefixed(piece), pattern, true);
    }
    case "Digits":
      return (piece) => parts(piece, step.individual_digits ? /\p{N}/gu : /\p{N}+/gu, true);
    case "WhitespaceSplit":
      return (piece) => parts(piece, /\p{White_Space}+/gu, false);
    default: {
      const pattern = new RegExp(step.JavaScript, "gu");
      return (piece) => parts(piece, pattern, step.behavior === "Isolated");
    }
  }
}

// Split a text at the matches of a pattern; `keep` also returns the matches.
function parts(text, pattern, keep) {
  const found = [];
  let start = 0;
  for (const match of text.matchAll(pattern)) {
    if (!match[0]) continue;
    if (match.index > start) found.push(text.slice(start, match.index));
    if (keep) found.push(match[0]);
    start = match.index + match[0].length;
  }
  if (start < text.length) found.push(text.slice(start));
  return found;
}

// The first text of a sample [{ text, ids }] that the tokenizer encodes in another way than the library did, if any.
export function differing(tokenizer, sample) {
  return sample.find(({ text, ids }) => JSON.stringify(tokenizer.encode(text)) !== JSON.stringify(ids))?.text;
}
