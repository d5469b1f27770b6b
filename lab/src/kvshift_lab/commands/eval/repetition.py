"""Measures of repetition in texts, given as sequences of tokens of any kind.

A text of t tokens has t - n + 1 n-grams: one starts at each position except the last n - 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvshift_lab.core.statistics import Estimate

LOOP_TIMES = 3

Tokens = Sequence[int]


def rep(tokens: Tokens, n: int) -> float:
    """Return the share of the n-grams of a continuation that repeat an earlier one: rep-n, or seq-rep-n.

        rep-n = 1 - |distinct n-grams| / |n-grams|

    The value lies between 0 (no repetition) and nearly 1. It is 0 for a text of fewer than n tokens. Source: Welleck et
    al. 2020, Neural text generation with unlikelihood training, who report n = 4.
    """
    grams = _grams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(continuations: Sequence[Tokens], n: int) -> Estimate:
    """Return the number of distinct n-grams of all continuations per generated token: distinct-n.

        distinct-n = |distinct n-grams| / |tokens|

    The value falls with the number of continuations and with their length, so only sets of equal number and length can
    be compared. The standard error is that of a jackknife over continuations, which tends to overestimate the variance
    (Efron and Stein 1981, The jackknife estimate of variance). Source: Li et al. 2016, A diversity-promoting objective
    function for neural conversation models, who report n = 1 and 2, also per generated token.
    """
    value, without = _distinct(continuations, n)
    return Estimate(value, _jackknife(without), len(continuations))


def distinct_difference(ours: Sequence[Tokens], theirs: Sequence[Tokens], n: int) -> Estimate:
    """Return distinct-n of `ours` minus distinct-n of `theirs`: continuations of the same prompts in the same order."""
    if len(ours) != len(theirs):
        raise ValueError(
            f"ours and theirs must have the same number of continuations, got {len(ours)} and {len(theirs)}"
        )
    (our, our_without), (their, their_without) = _distinct(ours, n), _distinct(theirs, n)
    return Estimate(our - their, _jackknife(our_without - their_without), len(ours))


def loop_length(tokens: Tokens) -> int | None:
    """Return the length in tokens of the phrase that a text repeats three times at its end; None if there is none.

    The phrase is the shortest one of at least two tokens; a single token repeated six times counts as a phrase of two
    tokens, three times. Source: Holtzman et al. 2020, The curious case of neural text degeneration, who define
    "repetition" as such an ending: a phrase of at least two tokens, three times or more.
    """
    for length in range(2, len(tokens) // LOOP_TIMES + 1):
        end = list(tokens[len(tokens) - length * LOOP_TIMES :])
        if end == end[:length] * LOOP_TIMES:
            return length
    return None


def _grams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    if n < 1:
        raise ValueError(f"n must be 1 or more, got {n}")
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def _distinct(continuations: Sequence[Tokens], n: int) -> tuple[float, np.ndarray]:
    """Return distinct-n of all k continuations, and its (k,) leave-one-out values; 0 where there are no tokens."""
    grams = [set(_grams(tokens, n)) for tokens in continuations]
    found_in = Counter(gram for own in grams for gram in own)
    lost = np.array([sum(found_in[gram] == 1 for gram in own) for own in grams])
    tokens = np.array([len(tokens) for tokens in continuations])
    left = tokens.sum() - tokens
    return len(found_in) / max(int(tokens.sum()), 1), (len(found_in) - lost) / np.maximum(left, 1)


def _jackknife(without: np.ndarray) -> float | None:
    """Return sqrt((k - 1) / k sum((x_i - mean(x))^2)) for k leave-one-out values x_i; None for k = 1."""
    k = len(without)
    return math.sqrt((k - 1) / k * float(np.sum((without - without.mean()) ** 2))) if k > 1 else None
