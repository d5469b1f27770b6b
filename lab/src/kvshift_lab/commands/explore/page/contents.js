// Contents of keys and values: with shift, those of a token are mixed with those of the tokens before it.

import { shares } from "./scores.js";

// Shares of each lag in the keys or values that a query head reads, with the signs of their coefficients:
// [itself, the token before, ...].
export function headShares(layer, name, head, heads) {
  const { values } = kvHead(layer, name, head, heads) ?? { values: [1] };
  return shares(layer?.[name], heads)[head].map((share, lag) => (values[lag] < 0 ? -share : share));
}

// The coefficients [lag] of the KV head that a query head reads from, and its number; null if they are not shifted.
export function kvHead(layer, name, head, heads) {
  const coefficients = layer?.[name];
  if (!coefficients) return null;
  const number = Math.floor((head * coefficients.length) / heads);
  return { number, values: coefficients[number] };
}

// The parts of the key or value at a position: [{position, lag, share}], without positions before the first token and
// without shares below 1 %.
export function madeOf(position, shareOfLag) {
  return shareOfLag
    .map((share, lag) => ({ position: position - lag, lag, share }))
    .filter((part) => part.position >= 0 && Math.abs(part.share) >= 0.01);
}

// The row of attention probabilities of one head and query.
export function attentionRow(attention, head, query, positions) {
  const start = (head * positions + query) * positions;
  return attention.subarray(start, start + positions);
}

// The index of the largest value in a row.
export function strongest(row) {
  let best = 0;
  for (let i = 1; i < row.length; i += 1) if (row[i] > row[best]) best = i;
  return best;
}

const LAGS = ["itself", "the token before", "two before", "three before"];

export const lagName = (lag) => LAGS[lag] ?? `${lag} before`;
