"""Benchmark scores with standard errors, and comparisons of two models on the same questions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvshift_lab.commands.eval.benchmarks import BENCHMARKS, PAPER
from kvshift_lab.core.statistics import mean_of

_RESAMPLES = 10_000


def scores(name: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the scores of a model on a benchmark.

    Args:
        name: Name of the benchmark.
        found: The result of `evaluate_benchmark`: for each question the metrics of lm-eval, 0 or 1, and facts of its
            prompt. LAMBADA also has the log-likelihood of the last word, which lm-eval calls perplexity.

    Returns:
        "metric", the reported metric, with its mean "score" and "stderr" over "items"; the means of the other metrics
        with their errors; "shots", the mean number of examples per prompt; "cut", the number of prompts that were too
        long even without examples; "macro", the mean of the subjects' scores if there are several subjects. The
        perplexity is exp(-mean(log-likelihood)), and its error is the error of that mean times the perplexity.
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
    """Return the mean of the eight scores of Table 2, with its error for independent tasks; None if one is missing."""
    if not set(PAPER) <= set(tasks):
        return None
    errors = [tasks[name]["stderr"] for name in PAPER]
    stderr = None if None in errors else math.hypot(*errors) / len(PAPER)
    return {"score": float(np.mean([tasks[name]["score"] for name in PAPER])), "stderr": stderr}


def compare(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Compare two models on the same questions.

    Args:
        ours, theirs: (questions,) 1 for a correct answer and 0 for a wrong one, in the same order.

    Returns:
        "difference" of the scores with "low" and "high", its 95 % interval by a bootstrap over pairs (percentiles of
        10,000 resamples); "only_first" and "only_second", the numbers of questions that only that model answers
        correctly; "p", the p-value of McNemar's exact test.
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
    """Compare the averages of two models (see `average`) by a bootstrap over the pairs within each benchmark."""
    if not set(PAPER) <= set(ours):
        return None
    pairs = [(ours[name], theirs[name]) for name in PAPER]
    difference = float(np.mean([np.mean(our) - np.mean(their) for our, their in pairs]))
    draws = [_resampled(our, their, seed) for seed, (our, their) in enumerate(pairs)]
    return _interval(difference, np.mean(draws, axis=0))


def _resampled(ours: np.ndarray, theirs: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return the difference in each bootstrap resample of the pairs.

    A pair differs by -1, 0 or 1, so the counts of the three values in a resample follow a multinomial distribution.
    """
    counts = np.array([np.sum(ours < theirs), np.sum(ours == theirs), np.sum(ours > theirs)])
    drawn = np.random.default_rng(seed).multinomial(len(ours), counts / len(ours), size=_RESAMPLES)
    return (drawn[:, 2] - drawn[:, 0]) / len(ours)


def _interval(difference: float, resampled: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {"difference": difference, "low": float(low), "high": float(high)}
