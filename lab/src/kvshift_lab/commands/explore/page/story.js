// The figure of the explanation: the last token's query matches a key, whose value determines the model's answer.

import { attentionRow, headShares, kvHead, madeOf, strongest } from "./contents.js";
import { h, inWords, percent, visible } from "./elements.js";

const MOST = 14; // maximum number of tokens that are drawn, from the last
const SURE = 0.2; // probability from which on a correct answer is not called a guess
const EMPTY = 0.1; // a key with a sum of |α| below this is called almost empty

// Draw the answer of a model and the reason for it; `state` comes from `stateOf` in explore.js.
export function drawStory(element, state, tokenText) {
  const { facts, result, tokens, scores, coefficients } = state;
  const text = (position) => visible(tokenText(tokens[position].id));
  const query = tokens.length - 1;
  const [{ id, probability }] = result.next[query].tokens;
  const answer = visible(tokenText(id));
  const { layer, head } = bestHead(scores);
  const row = attentionRow(result.attention[layer], head, query, tokens.length);
  const at = strongest(row);
  const shares = headShares(coefficients[layer], "alpha", head, facts.heads);
  const alpha = kvHead(coefficients[layer], "alpha", head, facts.heads)?.values;
  const isEmpty = alpha !== undefined && alpha.reduce((sum, value) => sum + Math.abs(value), 0) < EMPTY;
  const copied = isCopy(tokens, id);
  const right = probability < SURE ? "right, but hardly more than a guess" : "it copies";
  const verdict = copied === null ? "nothing to copy" : copied ? right : "it does not copy";

  const token = (position) => h("b", { className: "token" }, text(position));
  const parts = madeOf(at, shares);
  const key = isEmpty
    ? ["whose key is now almost empty: this head has learned to use only the token before"]
    : parts.length
      ? ["whose key is ", ...inWords(parts, token)]
      : ["whose key is almost empty: there is no token before it"];
  const cut = tokens.length > MOST ? ` (The last ${MOST} tokens are drawn.)` : "";
  const why = ["Of its heads, the one that is best at copying looks most at ", token(at), ` (${percent(row[at])}), `, ...key, ".", cut];
  const frame = h("div", { className: "row", tabIndex: 0, role: "group", "aria-label": `Figure of ${facts.name}` }, figure());
  element.replaceChildren(
    h("h2", {}, facts.name),
    h(
      "p",
      { className: "answer" },
      "After ", token(query), " it answers ", h("b", { className: "token" }, answer),
      `, with ${percent(probability)}: ${verdict}.`,
    ),
    frame,
    h("p", { className: "note" }, ...why),
  );
  frame.scrollLeft = frame.scrollWidth; // show the last token

  function figure() {
    const first = Math.max(0, tokens.length - MOST);
    const count = tokens.length - first;
    // Fit all tokens into the available width; on a narrow screen the names of rows are below them.
    const isNarrow = innerWidth < 480;
    const LEFT = isNarrow ? 0 : 68;
    const WIDTH = Math.max(22, Math.min(48, Math.floor((element.clientWidth - LEFT) / (count + 2))));
    const BOX = Math.min(34, WIDTH - 3);
    const x = (position) => LEFT + (position - first) * WIDTH + WIDTH / 2;
    const [tokenY, keyY] = [92, isNarrow ? 152 : 142];
    const below = isNarrow ? 30 : 5; // distance from the middle of a row to the baseline of its name
    const width = LEFT + (count + 2) * WIDTH;
    const label = `From ${text(query)}, the head attends most to ${text(at)}, ${percent(row[at])}; the answer is ${answer}, ${percent(probability)}.`;
    const svg = h("svg:svg", { viewBox: `0 0 ${width} ${keyY + (isNarrow ? 36 : 24)}`, role: "img", "aria-label": label });
    svg.style.width = `${width}px`;
    const add = (tag, attributes, content) => svg.append(h(`svg:${tag}`, attributes, content));
    add("text", { x: 0, y: tokenY + below, class: "small left" }, "token");
    add("text", { x: 0, y: keyY + below, class: "small left" }, "in its key");
    for (let position = first; position < tokens.length; position += 1) {
      const middle = x(position);
      add("rect", { x: middle - BOX / 2, y: tokenY - BOX / 2, width: BOX, height: BOX, rx: 3, class: "box" });
      add("text", { x: middle, y: tokenY + 5 }, text(position));
      drawKey(position, middle);
      if (row[position] >= 0.02) drawArc(position, middle);
    }
    add("rect", { x: x(query) - BOX / 2, y: tokenY - BOX / 2, width: BOX, height: BOX, rx: 3, class: "query" });
    add("text", { x: x(query) + WIDTH * 0.75, y: tokenY + 5 }, "→");
    add("text", { x: x(query) + WIDTH * 1.4, y: tokenY + 5 }, answer);
    add("text", { x: x(query) + WIDTH * 1.4, y: tokenY + 24, class: "small" }, percent(probability));
    return svg;

    // The parts of a key side by side, the token before on the left, as wide as their shares.
    function drawKey(position, middle) {
      const parts = isEmpty ? [] : madeOf(position, shares).reverse();
      let left = middle - BOX / 2;
      for (const { position: from, lag, share } of parts) {
        const wide = BOX * Math.abs(share);
        const name = `${share < 0 ? "−" : ""}${text(from)}`;
        add("rect", { x: left, y: keyY - 13, width: wide, height: 26, class: lag ? "prior" : "self" });
        if (wide > 10 * name.length) add("text", { x: left + wide / 2, y: keyY + 5 }, name);
        left += wide;
      }
    }

    function drawArc(position, middle) {
      const [from, top] = [x(query), tokenY - BOX / 2 - 2];
      const height = Math.min(66, 16 + Math.abs(from - middle) * 0.22);
      const path =
        position === query
          ? `M ${from - 6} ${top} C ${from - 16} ${top - 26}, ${from + 16} ${top - 26}, ${from + 6} ${top}`
          : `M ${from} ${top} C ${from} ${top - height}, ${middle} ${top - height}, ${middle} ${top}`;
      add("path", { d: path, class: "arc", "stroke-width": (1 + 6 * row[position]).toFixed(2), "stroke-opacity": (0.25 + 0.75 * row[position]).toFixed(2) });
      if (position === at && position !== query && row[at] >= 0.3) {
        add("text", { x: (from + middle) / 2, y: Math.max(12, top - height * 0.75 - 8), class: "small" }, percent(row[position]));
      }
    }
  }
}

function bestHead(scores) {
  let best = { layer: 0, head: 0 };
  scores.forEach((heads, layer) =>
    heads.forEach((score, head) => {
      if (score.induction > scores[best.layer][best.head].induction) best = { layer, head };
    }),
  );
  return best;
}

// Whether the answer followed an earlier occurrence of the last token; null if there is no such occurrence.
export function isCopy(tokens, answer) {
  const last = tokens.at(-1).id;
  const followers = tokens.slice(1).filter((_, before) => tokens[before].id === last);
  return followers.length ? followers.some(({ id }) => id === answer) : null;
}
