// Draws one model: next tokens, heads, the attention of a head, and its coefficients.

import { attentionRow, headShares, kvHead, lagName, madeOf, strongest } from "./contents.js";
import { h, inWords, percent, roving, signed, strength, visible } from "./elements.js";

const LISTED = 8; // number of heads in the list until all are requested
const LABELLED = 40; // maximum number of tokens that are written on the axes of the map
const SYMBOLS = { alpha: "α", beta: "β", gamma: "γ" };
const OF = { alpha: "keys", beta: "values", gamma: "queries" };
const SUBSCRIPTS = "₁₂₃₄₅₆₇₈₉";
const SCORES = { induction: "induction", previous: "previous token", duplicate: "duplicate token" };

export class ModelView {
  constructor(facts, { onHead, onCoefficients, onMeasure, tokenText }) {
    this.facts = facts;
    this.tokenText = tokenText;
    this.actions = { onHead, onCoefficients, onMeasure };
    this.showAll = false;
    this.parts = Object.fromEntries(
      ["next", "grid", "scores", "reading", "sentence", "mapNote", "heads"].map((name) => [name, h("div", { className: `${name}-part` })]),
    );
    this.parts.down = h("div", { className: "axis down", "aria-hidden": "true" });
    this.parts.across = h("div", { className: "axis across", "aria-hidden": "true" });
    this.parts.sentence = h("p", { className: "sentence", "aria-live": "polite" });
    this.parts.mapNote = h("p", { className: "note map-note" });
    this.parts.map = h("canvas", { className: "map", role: "img" });
    this.parts.map.addEventListener("pointermove", (event) => this.#readMap(event));
    this.parts.map.addEventListener("pointerleave", () => this.#mapNote());
    this.headTitle = h("h3");
    this.nextTitle = h("h3");
    this.sliders = h("fieldset", { className: "sliders" });
    this.attention = h(
      "div",
      {},
      h("h3", {}, "Attention of this head: queries down, keys across"),
      h("div", { className: "axes" }, this.parts.across, this.parts.down, this.parts.map),
      this.parts.mapNote,
      h("h3", {}, "Every head at the selected token"),
      this.parts.heads,
    );
    this.element = h(
      "article",
      { className: "model", "aria-label": facts.name },
      h("h2", {}, facts.name),
      h("p", { className: "note" }, describe(facts)),
      this.nextTitle,
      this.parts.next,
      h("h3", {}, `Heads, by layer`),
      this.parts.grid,
      this.headTitle,
      this.parts.scores,
      this.parts.reading,
      this.parts.sentence,
      this.sliders,
      this.attention,
    );
  }

  // state: {tokens, query, chosen: {layer, head}, coefficients, scores, accuracy, result, color}
  draw(state) {
    this.state = state;
    this.#grid();
    this.#scores();
    const ofText = [this.nextTitle, this.parts.next, this.parts.reading, this.parts.sentence, this.attention];
    for (const part of ofText) part.hidden = !state.tokens.length;
    if (!state.result || !state.tokens.length) return;
    this.#next();
    this.#reading();
    this.#map();
    this.#heads();
  }

  #label(position) {
    return this.state.tokens[position] ? visible(this.tokenText(this.state.tokens[position].id)) : "";
  }

  #token(position) {
    return h("b", { className: "token" }, this.#label(position));
  }

  #next() {
    const { result, query } = this.state;
    const { tokens: best, actual } = result.next[query];
    this.nextTitle.replaceChildren("Likely after ", this.#token(query), ` (${query + 1})`);
    const rows = best.map(({ id, probability }) =>
      h(
        "li",
        {},
        h("span", { className: "token" }, visible(this.tokenText(id))),
        h("span", { className: "bar", "aria-hidden": "true", "--p": `${100 * probability}%` }),
        h("span", { className: "percent" }, percent(probability)),
      ),
    );
    const after =
      actual === null
        ? "The text ends here."
        : h("span", {}, "The text goes on with ", this.#token(query + 1), `: ${percent(actual)}.`);
    this.parts.next.replaceChildren(h("ol", { className: "next" }, ...rows), h("p", { className: "note" }, after));
  }

  #value(layer, head) {
    const { color, scores, coefficients } = this.state;
    if (color in SCORES) return scores[layer][head][color];
    const [name, lag] = color.split(".");
    return kvHead(coefficients[layer], name, head, this.facts.heads)?.values[Number(lag)] ?? null;
  }

  #grid() {
    const { layers, heads } = this.facts;
    const { chosen, color } = this.state;
    const size = Math.max(1, Math.min(2.4, 26 / heads));
    const name = colorName(color);
    const cells = [];
    for (let layer = 0; layer < layers; layer += 1) {
      cells.push(h("span", { "aria-hidden": "true" }, String(layer)));
      for (let head = 0; head < heads; head += 1) {
        const value = this.#value(layer, head);
        const shown = value === null ? "none" : signed(value);
        cells.push(
          h(
            "button",
            {
              type: "button",
              role: "radio",
              className: value < 0 ? "minus" : "",
              title: `layer ${layer}, head ${head}: ${name} ${shown}`,
              "aria-label": `layer ${layer}, head ${head}, ${name} ${shown}`,
              "--a": strength(value ?? 0),
              onclick: () => this.actions.onHead(layer, head),
            },
            size >= 2 && value !== null ? signed(value) : "",
          ),
        );
      }
    }
    const hadFocus = this.parts.grid.contains(document.activeElement);
    const grid = h(
      "div",
      {
        className: "grid",
        role: "radiogroup",
        "aria-label": `Heads of ${this.facts.name}: layers down, heads across`,
        "--size": `${size}rem`,
      },
      ...cells,
    );
    grid.style.gridTemplateColumns = `max-content repeat(${heads}, ${size}rem)`;
    roving(grid, chosen.layer * heads + chosen.head, heads, (index) =>
      this.actions.onHead(Math.floor(index / heads), index % heads),
    );
    this.parts.grid.replaceChildren(grid);
    if (hadFocus) grid.querySelector('[tabindex="0"]').focus();
  }

  #scores() {
    const { chosen, scores, accuracy } = this.state;
    const of = scores[chosen.layer][chosen.head];
    this.headTitle.textContent = `Layer ${chosen.layer}, head ${chosen.head}`;
    this.parts.scores.className = "scores";
    this.parts.scores.replaceChildren(
      ...Object.entries(SCORES).map(([score, name]) => h("span", {}, `${name} `, h("b", {}, of[score].toFixed(2)))),
      h("span", { className: "note" }, `model right on repeated tokens: ${percent(accuracy)}`),
    );
  }

  #row(layer, head) {
    const { result, query, tokens } = this.state;
    return attentionRow(result.attention[layer], head, query, tokens.length);
  }

  // Describe what a head attends to in a sentence: the position, and the parts of its key and of its value.
  #looksAt(layer, head, query) {
    const { coefficients, result, tokens } = this.state;
    const row = attentionRow(result.attention[layer], head, query, tokens.length);
    const at = strongest(row);
    const parts = (name) => madeOf(at, headShares(coefficients[layer], name, head, this.facts.heads));
    const [keys, values] = [parts("alpha"), parts("beta")];
    const where = [this.#token(at), ` (${at + 1}), ${percent(row[at])}`];
    if (keys.length < 2 && values.length < 2 && !(coefficients[layer]?.alpha || coefficients[layer]?.beta)) {
      return ["looks at ", ...where, ", key and value of ", h("span", { className: "itself" }, "the token itself")];
    }
    return [
      "looks at ",
      ...where,
      ". Key: ",
      ...this.#madeOf(keys),
      ". Value: ",
      ...this.#madeOf(values),
    ];
  }

  #madeOf(parts) {
    return inWords(parts, (position) => this.#token(position));
  }

  #reading() {
    const { chosen, query, tokens } = this.state;
    const row = this.#row(chosen.layer, chosen.head);
    const spans = tokens.map((_, position) =>
      h(
        "span",
        {
          className: position === query ? "here" : "",
          "--a": strength(position <= query ? row[position] : 0),
          title: position <= query ? `${percent(row[position])} of the attention` : "later",
        },
        this.#label(position),
      ),
    );
    const label = `Attention of layer ${chosen.layer}, head ${chosen.head}, over the text`;
    this.parts.reading.replaceChildren(h("div", { className: "reading", role: "img", "aria-label": label }, ...spans));
    this.parts.sentence.replaceChildren("From ", this.#token(query), ` (${query + 1}) it `, ...this.#looksAt(chosen.layer, chosen.head, query), ".");
  }

  #map() {
    const { chosen, result, tokens } = this.state;
    const n = tokens.length;
    const canvas = this.parts.map;
    const scale = Math.max(1, Math.floor(640 / n));
    canvas.width = canvas.height = n * scale;
    const context = canvas.getContext("2d");
    const color = getComputedStyle(document.documentElement).getPropertyValue("--cell").trim().split(" ").join(",");
    const values = result.attention[chosen.layer];
    for (let t = 0; t < n; t += 1) {
      for (let s = 0; s <= t; s += 1) {
        context.fillStyle = `rgba(${color},${values[(chosen.head * n + t) * n + s]})`;
        context.fillRect(s * scale, t * scale, scale - (scale > 4), scale - (scale > 4));
      }
    }
    for (const axis of [this.parts.down, this.parts.across]) {
      axis.replaceChildren(...(n > LABELLED ? [] : tokens.map((_, position) => h("span", {}, this.#label(position)))));
    }
    canvas.setAttribute(
      "aria-label",
      `Attention of layer ${chosen.layer}, head ${chosen.head}; the list below says for each head what it looks at`,
    );
    this.#mapNote();
  }

  #mapNote() {
    this.parts.mapNote.textContent = "Point at the map to read a cell.";
  }

  #readMap(event) {
    if (!this.state?.result) return;
    const { chosen, tokens, result } = this.state;
    const box = this.parts.map.getBoundingClientRect();
    const n = tokens.length;
    const cell = (at, size) => Math.max(0, Math.min(n - 1, Math.floor((at / size) * n)));
    const [t, s] = [cell(event.clientY - box.top, box.height), cell(event.clientX - box.left, box.width)];
    if (s > t) return this.#mapNote();
    const value = result.attention[chosen.layer][(chosen.head * n + t) * n + s];
    const keys = madeOf(s, headShares(this.state.coefficients[chosen.layer], "alpha", chosen.head, this.facts.heads));
    this.parts.mapNote.replaceChildren(
      "From ", this.#token(t), ` (${t + 1}) to `, this.#token(s), ` (${s + 1}): ${percent(value)}. Key: `, ...this.#madeOf(keys), ".",
    );
  }

  #heads() {
    const { chosen, scores, color } = this.state;
    const all = scores.flatMap((layer, number) => layer.map((_, head) => ({ layer: number, head })));
    all.sort((a, b) => (this.#value(b.layer, b.head) ?? 0) - (this.#value(a.layer, a.head) ?? 0));
    const shown = this.showAll ? all : all.slice(0, LISTED);
    const rows = shown.map(({ layer, head }) => {
      const isChosen = layer === chosen.layer && head === chosen.head;
      const row = this.#row(layer, head);
      const of = scores[layer][head];
      return h(
        "li",
        { className: isChosen ? "selected" : "" },
        h(
          "button",
          {
            type: "button",
            className: "name",
            "aria-pressed": String(isChosen),
            onclick: () => this.actions.onHead(layer, head),
          },
          `Layer ${layer}, head ${head}`,
        ),
        " ",
        ...this.#looksAt(layer, head, this.state.query),
        h(
          "div",
          { className: "strip", "aria-hidden": "true" },
          ...Array.from(row, (value, at) => h("i", { "--a": strength(value), title: `${this.#label(at)} ${percent(value)}` })),
        ),
        h("div", { className: "numbers" }, ...this.#numbers(layer, head), `scores: ${Object.entries(SCORES).map(([score, name]) => `${name} ${of[score].toFixed(2)}`).join(", ")}`),
      );
    });
    const rest = all.length - shown.length;
    const more = rest
      ? h("button", { type: "button", className: "more", onclick: () => { this.showAll = true; this.#heads(); } }, `Show the other ${rest} heads`)
      : null;
    const note = `${all.length > 1 ? `Highest ${colorName(color)} first. ` : ""}Cells: attention over the text, from left to right.`;
    this.parts.heads.replaceChildren(h("p", { className: "note" }, note), h("ul", { className: "heads" }, ...rows), ...(more ? [more] : []));
  }

  #numbers(layer, head) {
    const { coefficients } = this.state;
    return Object.keys(coefficients[layer] ?? {}).flatMap((name) => {
      const { values } = kvHead(coefficients[layer], name, head, this.facts.heads);
      return [`${SYMBOLS[name]} ${values.map(signed).join(", ")}; `];
    });
  }

  // Draw sliders for the coefficients of the chosen head; called again only for another head or after a reset or `dial`.
  drawSliders(state) {
    this.state = state;
    const { chosen, coefficients } = state;
    const layer = coefficients[chosen.layer];
    if (!layer || !Object.keys(layer).length) {
      this.sliders.replaceChildren(h("p", { className: "note" }, "This model has no shift: every key and value is that of its own token."));
      return;
    }
    const everywhere = h("input", { type: "checkbox", checked: this.everywhere ?? false, onchange: () => { this.everywhere = everywhere.checked; } });
    const rows = Object.keys(layer).flatMap((name) => {
      const { number, values } = kvHead(layer, name, chosen.head, this.facts.heads);
      return values.map((value, lag) => {
        const output = h("output", {}, signed(value));
        const label = `${SYMBOLS[name]}${SUBSCRIPTS[lag]}: ${OF[name]}, ${lagName(lag)}`;
        const limit = Math.max(2, Math.ceil(Math.abs(value)));
        const id = `${this.facts.id}-${name}-${lag}`;
        const input = h("input", { type: "range", id, min: -limit, max: limit, step: 0.01, value });
        input.addEventListener("input", () => {
          output.textContent = signed(Number(input.value));
          this.actions.onCoefficients(name, everywhere.checked ? null : { layer: chosen.layer, head: number }, lag, Number(input.value));
        });
        return h("div", { className: "slider" }, h("label", { for: id }, label), input, output);
      });
    });
    this.sliders.replaceChildren(
      h("legend", {}, "What keys and values are made of"),
      ...rows,
      h(
        "div",
        { className: "buttons" },
        h("button", { type: "button", onclick: () => this.actions.onCoefficients() }, "Learned values"),
        h("label", {}, everywhere, " move all heads together"),
        this.facts.slow ? h("button", { type: "button", onclick: () => this.actions.onMeasure() }, "Measure scores again") : null,
      ),
    );
  }
}

export function colorName(color) {
  if (color in SCORES) return `${SCORES[color]} score`;
  const [name, lag] = color.split(".");
  return `${SYMBOLS[name]}${SUBSCRIPTS[lag]}`;
}

// The options for coloring heads by a coefficient: [value, text].
export function coefficientColors(models) {
  const found = new Map();
  for (const { coefficients } of models) {
    for (const [name, heads] of Object.entries(coefficients[0] ?? {})) {
      heads[0].forEach((_, lag) => found.set(`${name}.${lag}`, `${SYMBOLS[name]}${SUBSCRIPTS[lag]}, of ${OF[name]}: ${lagName(lag)}`));
    }
  }
  return [...found];
}

function describe({ type, layers, heads, parameters, coefficients }) {
  const shifted = Object.keys(coefficients[0] ?? {}).map((name) => OF[name]);
  const shift = shifted.length ? `KV shift of ${shifted.join(" and ")}` : "without shift";
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  return `${shift}; ${plural(layers, "layer")}, ${plural(heads, "head")} each, ${parameters.toLocaleString("en")} parameters (${type})`;
}
