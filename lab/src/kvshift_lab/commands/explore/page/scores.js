// Scores of heads on repeated sequences, as defined in `kvshift_lab.run.head_scores`.

// Shares of each lag in what a query head reads, from coefficients [KV head][lag]; without coefficients, [1].
export function shares(coefficients, heads) {
  if (!coefficients) return Array.from({ length: heads }, () => [1]);
  const group = heads / coefficients.length;
  return Array.from({ length: heads }, (_, head) => {
    const sizes = coefficients[Math.floor(head / group)].map(Math.abs);
    const sum = sizes.reduce((a, b) => a + b, 0);
    return sizes.map((size) => (sum > 0 ? size / sum : 0));
  });
}

// Previous-token, duplicate-token and induction scores of what the heads of one layer move, and `alone`.
//
//   attention  probabilities [head][query][key] in one array, of a sequence whose last `length` tokens repeat those before
//   alpha      coefficients of keys [KV head][lag]; beta those of values; undefined if they are not shifted
export function headScores(attention, { heads, length, alpha, beta }) {
  const positions = Math.round(Math.sqrt(attention.length / heads));
  const second = positions - length + 1;
  const [keys, values] = [shares(alpha, heads), shares(beta, heads)];

  // Mean over t >= first of the attention from t to t - back.
  const meanBack = (head, back, first) => {
    if (back < 0) return 0;
    let sum = 0;
    for (let t = first; t < positions; t += 1) sum += attention[(head * positions + t) * positions + t - back];
    return sum / (positions - first);
  };
  const moved = (head, back, first) =>
    values[head].reduce((sum, share, lag) => sum + share * meanBack(head, back - lag, first), 0);

  return Array.from({ length: heads }, (_, head) => {
    let alone = 0;
    for (let lag = 1; lag < Math.min(keys[head].length, values[head].length + 1); lag += 1) {
      alone += keys[head][lag] * values[head][lag - 1] * meanBack(head, length - lag, second);
    }
    return {
      induction: moved(head, length - 1, second),
      previous: moved(head, 1, 1),
      duplicate: moved(head, length, second),
      alone,
    };
  });
}
