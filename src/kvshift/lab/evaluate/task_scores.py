"""Scores on benchmarks, with their errors, and what two models' answers to the same questions say of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvshift.lab.core.statistics import mean_of
from kvshift.lab.evaluate.benchmarks import BENCHMARKS, PAPER

_RESAMPLES = 10_000


def scores(name: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a model has reached on a benchmark.

    Args:
        name: of the benchmark.
        found: from `ask`: for each question the metrics of lm-eval, 0 or 1, and what its prompt was; of LAMBADA also
            the log-likelihood of the last word, which lm-eval calls perplexity.

    Returns:
        "metric", the one that is reported, its mean "score" and "stderr", over "items"; the means of the others, with
        their errors; "shots", the mean number of examples in a prompt, and "cut", the prompts that were too long even
        without; "macro", the mean of the subjects' scores where there are several. The perplexity is
        exp(-mean(log-likelihood)), and its error that of the mean times the perplexity.
    """
    metric = BENCHMARKS[name].metric
    score = mean_of([float(item[metric]) for item in found])
    numbers: dict[str, Any] = {"metric": metric, "score": score.mean, "stderr": score.stderr, "items": score.n}
    numbers["shots"] = float(np.mean([item["shots"] for item in found]))
    numbers["cut"] = sum(not item["whole"] for item in found)
    for other in sorted(set(found[0]) - {metric, "subject", "shots", "whole"}):
        mean = mean_of([float(item[other]) for item in found])
        value, stderr = mean.mean, mean.stderr
        if other == "perplexity":
            value = math.exp(min(-value, 700.0))
            stderr = None if stderr is None else value * stderr
        numbers |= {other: value, f"{other}_stderr": stderr}
    subjects = defaultdict(list)
    for item in found:
        subjects[item["subject"]].append(float(item[metric]))
    if len(subjects) > 1:
        numbers["macro"] = float(np.mean([np.mean(values) for values in subjects.values()]))
    return numbers


def average(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The mean of the eight scores of Table 2, the tasks taken as independent; None where one of them is missing."""
    if not set(PAPER) <= set(tasks):
        return None
    errors = [tasks[name]["stderr"] for name in PAPER]
    stderr = None if None in errors else math.hypot(*errors) / len(PAPER)
    return {"score": float(np.mean([tasks[name]["score"] for name in PAPER])), "stderr": stderr}


def compare(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Two models on the same questions.

    Args:
        ours, theirs: (questions,) 1 where the answer is right, else 0, in the same order.

    Returns:
        "difference" of the scores with "low" and "high", its 95 % interval by a bootstrap over pairs (percentiles of
        10,000 resamples); "only_first" and "only_second", the questions that one of them alone has right; "p" of
        McNemar's exact test: the probability, were both equally good, of a split at least as uneven.
    """
    from scipy.stats import binomtest  # takes half a second to import

    only_first, only_second = int(np.sum(ours > theirs)), int(np.sum(ours < theirs))
    p = binomtest(only_first, only_first + only_second).pvalue if only_first + only_second else 1.0
    return {
        **_interval(float(np.mean(ours) - np.mean(theirs)), _resampled(ours, theirs)),
        "only_first": only_first,
        "only_second": only_second,
        "p": float(p),
    }


def compare_averages(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """Two models' averages as `average` makes them; pairs are drawn again within each benchmark."""
    if not set(PAPER) <= set(ours):
        return None
    pairs = [(ours[name], theirs[name]) for name in PAPER]
    difference = float(np.mean([np.mean(our) - np.mean(their) for our, their in pairs]))
    draws = [_resampled(our, their, seed) for seed, (our, their) in enumerate(pairs)]
    return _interval(difference, np.mean(draws, axis=0))


def _resampled(ours: np.ndarray, theirs: np.ndarray, seed: int = 0) -> np.ndarray:
    """The difference in each resample of the pairs.

    A pair differs by -1, 0 or 1, so that the counts of the three in a resample are one draw of a multinomial.
    """
    counts = np.array([np.sum(ours < theirs), np.sum(ours == theirs), np.sum(ours > theirs)])
    drawn = np.random.default_rng(seed).multinomial(len(ours), counts / len(ours), size=_RESAMPLES)
    return (drawn[:, 2] - drawn[:, 0]) / len(ours)


def _interval(difference: float, resampled: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {"difference": difference, "low": float(low), "high": float(high)}
