"""How much a text repeats itself; of tokens, whatever a token is.

A text of t tokens has t - n + 1 n-grams, one at each position but the last n - 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvshift.lab.core.statistics import Estimate

LOOP_TIMES = 3

Tokens = Sequence[int]


def rep(tokens: Tokens, n: int) -> float:
    """The share of the n-grams of a continuation that repeat an earlier one: rep-n, or seq-rep-n.

        rep-n = 1 - |distinct n-grams| / |n-grams|

    From 0, nothing is repeated, to nearly 1. A text of fewer than n tokens repeats nothing: 0. (Welleck et al. 2020,
    Neural text generation with unlikelihood training, who report n = 4.)
    """
    grams = _grams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(continuations: Sequence[Tokens], n: int) -> Estimate:
    """The distinct n-grams of all continuations together, for each token in them: distinct-n.

        distinct-n = |distinct n-grams| / |tokens|

    It falls with the number of continuations and with their length; only equally many, equally long ones compare. The
    error is that of a jackknife over continuations, which overestimates the variance rather than underestimates it
    (Efron and Stein 1981, The jackknife estimate of variance). (Li et al. 2016, A diversity-promoting objective
    function for neural conversation models, who report n = 1 and 2, likewise for each generated token.)
    """
    value, without = _distinct(continuations, n)
    return Estimate(value, _jackknife(without), len(continuations))


def distinct_difference(ours: Sequence[Tokens], theirs: Sequence[Tokens], n: int) -> Estimate:
    """distinct-n of `ours` minus that of `theirs`, continuations of the same prompts in the same order."""
    if len(ours) != len(theirs):
        raise ValueError(f"pairs need as many continuations on both sides, got {len(ours)} and {len(theirs)}")
    (our, our_without), (their, their_without) = _distinct(ours, n), _distinct(theirs, n)
    return Estimate(our - their, _jackknife(our_without - their_without), len(ours))


def loop_length(tokens: Tokens, *, times: int = LOOP_TIMES, shortest: int = 2) -> int | None:
    """The tokens of the phrase that a text ends with `times` times in a row; None where there is none.

    The shortest such phrase of `shortest` tokens or more; a single token six times is a phrase of two, three times.
    (Holtzman et al. 2020, The curious case of neural text degeneration, whose "repetition" is such an end: a phrase of
    at least two tokens, three times or more.)
    """
    for length in range(shortest, len(tokens) // times + 1):
        end = list(tokens[len(tokens) - length * times :])
        if end == end[:length] * times:
            return length
    return None


def _grams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    if n < 1:
        raise ValueError(f"n must be 1 or more, got {n}")
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def _distinct(continuations: Sequence[Tokens], n: int) -> tuple[float, np.ndarray]:
    """distinct-n, and (k,) the same without each one of the k continuations; without any token, 0."""
    grams = [set(_grams(tokens, n)) for tokens in continuations]
    found_in = Counter(gram for own in grams for gram in own)
    lost = np.array([sum(found_in[gram] == 1 for gram in own) for own in grams])
    tokens = np.array([len(tokens) for tokens in continuations])
    left = tokens.sum() - tokens
    return len(found_in) / max(int(tokens.sum()), 1), (len(found_in) - lost) / np.maximum(left, 1)


def _jackknife(without: np.ndarray) -> float | None:
    """sqrt((k - 1) / k sum((x_i - mean(x))^2)) of the values without each one; None of a single one."""
    k = len(without)
    return math.sqrt((k - 1) / k * float(np.sum((without - without.mean()) ** 2))) if k > 1 else None
