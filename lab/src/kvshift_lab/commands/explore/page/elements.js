// Helpers to create and fill elements.

import { lagName } from "./contents.js";

// Create an element with properties, attributes (names with a dash, `role`, `for`), and children.
export function h(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (tag.startsWith("svg:") || name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

export function percent(share) {
  const size = 100 * Math.abs(share);
  return `${share < 0 ? "−" : ""}${size > 0 && size < 0.95 ? size.toFixed(1) : Math.round(size)} %`;
}

export function signed(value) {
  const size = Math.abs(value).toFixed(2);
  return `${value < 0 && Number(size) > 0 ? "−" : ""}${size}`;
}

// Describe the parts of a key or value, the largest first: "72 % from a, the token before, and 28 % from b itself".
export function inWords(parts, tokenAt) {
  if (!parts.length) return ["almost nothing"]; // of the first token, if only the one before counts
  const sorted = [...parts].sort((a, b) => Math.abs(b.share) - Math.abs(a.share));
  return sorted.flatMap(({ position, lag, share }, index) => [
    index ? ", and " : "",
    `${percent(share)} from `,
    tokenAt(position),
    lag ? ", " : " ",
    h("span", { className: lag ? "before" : "itself" }, lagName(lag)),
  ]);
}

// The opacity of a cell's color, limited so that its text stays legible.
export const strength = (share) => (0.75 * Math.min(1, Math.abs(share))).toFixed(3);

// Make spaces, line breaks and control characters of a text visible.
export function visible(text) {
  const known = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
  const hexadecimal = (control) => `⟨${control.charCodeAt(0).toString(16).padStart(2, "0")}⟩`;
  return known.replace(/\p{Cc}/gu, hexadecimal) || "∅";
}

// Make one of several buttons reachable by Tab and the others by arrow keys, which call `choose` with an index.
export function roving(container, chosen, columns, choose) {
  const buttons = [...container.querySelectorAll("button")];
  buttons.forEach((button, index) => {
    button.tabIndex = index === chosen ? 0 : -1;
    button.setAttribute("aria-checked", String(index === chosen));
  });
  container.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    const at = buttons.indexOf(document.activeElement);
    let to = step === undefined || at < 0 ? undefined : at + step;
    if (event.key === "Home") to = 0;
    if (event.key === "End") to = buttons.length - 1;
    if (to === undefined || !buttons[to]) return;
    event.preventDefault();
    buttons[to].focus();
    choose(to);
  };
}
