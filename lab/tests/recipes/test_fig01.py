"""Figures 1a and 1b: the verdicts on given learning curves, and the sizes and settings of the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kvshift_lab.recipes.fig01a import study as fig01a
from kvshift_lab.recipes.fig01b import study as fig01b
from kvshift_lab.study.recipe import Record

from ..study.cases import made_up

OPTIONS = {"task": {"name": "induction", "length": 16, "vocab_size": 64}, "steps": 400}
ALWAYS = {"vanilla, 4 layers": (0.1, 0.5, 0.95, 1.0), "vanilla, 2 layers": (0.1, 0.5, 0.95, 1.0)}
NEVER = (0.1, 0.1, 0.1, 0.1)
AT_ONCE = (0.95, 1.0, 1.0, 1.0)


def records(curves: Mapping[str, Sequence[float]], jitter: float = 5e-4, seeds: int = 6) -> list[Record]:
    return [
        made_up(
            label,
            seed,
            options=OPTIONS,
            curve={
                "step": [100, 200, 300, 400],
                "first_repeat": [max(0, value - seed * jitter * (1 + number)) for number, value in enumerate(accuracy)],
            },
        )
        for label, accuracy in curves.items()
        for seed in range(seeds)
    ]


def directions(curves: Mapping[str, Sequence[float]], seeds: int = 6) -> list[str]:
    return [claim.direction for claim in fig01a.RECIPE.claims(records(curves, seeds=seeds))]


@pytest.mark.parametrize(
    ("ours", "one", "two", "expected"),
    [
        (AT_ONCE, NEVER, (0.1, 0.5, 0.95, 1.0), ["holds", "holds", "holds"]),
        (NEVER, NEVER, (0.1, 0.5, 0.95, 1.0), ["fails", "holds", "fails"]),
        (AT_ONCE, AT_ONCE, (0.1, 0.5, 0.95, 1.0), ["holds", "fails", "holds"]),
        (AT_ONCE, NEVER, AT_ONCE, ["holds", "holds", "fails"]),
        (AT_ONCE, NEVER, NEVER, ["holds", "holds", "holds"]),  # a run that never learns counts at its last step
        ((0.1, 0.5, 0.95, 1.0), NEVER, NEVER, ["holds", "holds", "not shown"]),  # ratios below 0.72 include 0.5
    ],
    ids=["paper", "no-learner", "one-layer-too", "equal", "never", "late"],
)
def test_claims_of_figure_1a(ours, one, two, expected) -> None:
    curves = {
        "vanilla, 4 layers": two,
        "vanilla, 2 layers": two,
        "vanilla, 1 layer": one,
        "KV-shift, 1 layer": ours,
    }
    assert directions(curves)[:3] == expected


def test_five_of_five_do_not_decide_what_has_no_interval() -> None:
    """If two plain layers never reach 90 %, each seed only bounds the ratio of steps, and there is no interval."""
    curves = {
        "vanilla, 4 layers": NEVER,
        "vanilla, 2 layers": NEVER,
        "vanilla, 1 layer": NEVER,
        "KV-shift, 1 layer": AT_ONCE,
    }
    assert directions(curves)[2] == "holds"
    assert directions(curves, seeds=5)[2] == "not shown"


def test_what_was_not_learned_was_not_within_the_steps_that_there_were() -> None:
    curves = {**ALWAYS, "vanilla, 1 layer": (0.1, 0.3, 0.5, 0.7), "KV-shift, 1 layer": AT_ONCE}
    slow = fig01a.RECIPE.claims(records(curves))[1]
    assert slow.statement == "One layer without KV shift does not learn the task in 400 steps"


def test_four_layers_sooner_than_two_fails_the_claim() -> None:
    curves = {**ALWAYS, "vanilla, 1 layer": NEVER, "KV-shift, 1 layer": AT_ONCE}
    assert directions(curves)[3] == "not shown"
    assert directions({**curves, "vanilla, 4 layers": AT_ONCE})[3] == "fails"
    assert directions({**curves, "vanilla, 2 layers": AT_ONCE})[3] == "holds"


def test_claim_of_figure_1b() -> None:
    shifted, plain = "KV-shift, 1 layer", "vanilla, 2 layers"
    [ahead] = fig01b.RECIPE.claims([*records({plain: NEVER}), *records({shifted: AT_ONCE}, jitter=1e-4)])
    assert ahead.direction == "holds"
    assert "points (95 % interval" in ahead.ours
    [behind] = fig01b.RECIPE.claims([*records({plain: AT_ONCE}), *records({shifted: NEVER}, jitter=1e-4)])
    assert behind.direction == "fails"


def test_the_papers_preset_is_the_papers() -> None:
    jobs = fig01a.RECIPE.jobs("paper", range(3))
    assert len(jobs) == 12
    for job in jobs:
        config = job.config
        assert config.batch_size * config.accumulation == 8 * 512
        assert (config.task.length, config.task.vocab_size, config.task.mode) == (512, 8000, "script")
        assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (2e-4, 1000)
        assert config.model.hidden_size == 1024
