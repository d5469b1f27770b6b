"""Scores of benchmarks and the comparison of two models, by hand and by simulation, without any model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvshift_lab.commands.eval.benchmarks import PAPER
from kvshift_lab.commands.eval.task_scores import average, compare, compare_averages, scores


def test_mcnemar_and_the_bootstrap_over_pairs():
    random = np.random.default_rng(1)
    ours, theirs = (random.random(211) < 0.6).astype(float), (random.random(211) < 0.5).astype(float)
    found = compare(ours, theirs)
    b, c = int(sum(ours > theirs)), int(sum(ours < theirs))
    assert (found["only_first"], found["only_second"]) == (b, c)
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c)
    assert found["p"] == pytest.approx(min(1.0, 2 * tail), rel=1e-9)
    assert found["difference"] == pytest.approx(ours.mean() - theirs.mean(), rel=1e-12)
    drawn = [(ours - theirs)[random.integers(0, 211, 211)].mean() for _ in range(20_000)]  # bootstrap over questions
    for end, quantile in (("low", 0.025), ("high", 0.975)):
        assert found[end] == pytest.approx(np.quantile(drawn, quantile), abs=1.5 / 211)


def test_models_that_do_not_differ():
    same = compare(np.array([1.0, 0.0, 1.0]), np.array([1.0, 0.0, 1.0]))
    assert same == {"difference": 0, "low": 0, "high": 0, "only_first": 0, "only_second": 0, "p": 1}


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """The pairs have a known difference; coverage of 95 % means 90 to 99 % of 400 intervals."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        theirs = random.random(300) < 0.4
        ours = np.where(random.random(300) < 0.25, random.random(300) < 0.6, theirs)  # 0.25 * (0.6 - 0.4) = 0.05 better
        found = compare(ours.astype(float), theirs.astype(float))
        held += found["low"] <= 0.05 <= found["high"]
    assert 0.90 <= held / 400 <= 0.99


def test_averages_are_of_the_eight():
    random = np.random.default_rng(2)
    sides = [{name: (random.random(50) < p).astype(float) for name in PAPER} for p in (0.7, 0.4)]
    found = compare_averages(*sides)
    assert found is not None
    assert found["difference"] == pytest.approx(np.mean([sides[0][n].mean() - sides[1][n].mean() for n in PAPER]))
    errors = [np.std(sides[0][name] - sides[1][name], ddof=1) / math.sqrt(50) for name in PAPER]
    half = 1.96 * math.hypot(*errors) / 8
    assert found["high"] - found["low"] == pytest.approx(2 * half, rel=0.1)
    assert compare_averages({}, {}) is None
    assert average({"mmlu": {"score": 1.0, "stderr": 0.0}}) is None


def test_scores_by_hand():
    facts = {"shots": 0, "whole": True}
    found = scores(
        "lambada",
        [
            {"acc": 1, "perplexity": -1.0, "subject": "", **facts},
            {"acc": 0, "perplexity": -3.0, "subject": "", **facts, "whole": False},
        ],
    )
    assert (found["score"], found["stderr"], found["items"]) == (0.5, 0.5, 2)
    assert (found["perplexity"], found["perplexity_stderr"]) == (math.exp(2), pytest.approx(math.exp(2)))
    assert (found["shots"], found["cut"]) == (0, 1)
    assert "macro" not in found
    items = [(1, "a"), (1, "a"), (0, "a"), (0, "b")]
    found = scores("mmlu_zero", [{"acc": acc, "subject": subject, **facts} for acc, subject in items])
    assert found["score"] == 0.5
    assert found["macro"] == pytest.approx((2 / 3 + 0) / 2)
