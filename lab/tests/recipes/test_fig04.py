"""Figure 4: the learning rates, the criterion for divergence, the verdicts and the figure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvshift_lab.recipes.fig04 import study as fig04
from kvshift_lab.recipes.fig04.study import PAPER_RATES
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.recipe import Record
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA

from ..study.cases import made_up

RECIPE = fig04.RECIPE


def records(gains: list[float], *, size: str | None = "1.5B") -> list[Record]:
    """Return runs at every rate: vanilla ends a little above 3, KV-shift lower by the gain of the seed."""
    found = []
    for rate in PAPER_RATES:
        for seed, gain in enumerate(gains):
            for variant in SHIFTED_AND_VANILLA:
                end = 3 + 0.1 * seed - (gain if variant == "kv-shift" else 0)
                curve = {"step": [100, 200, 300], "loss": [5.0, 3.9, end]}
                options = {"optimizer": {"learning_rate": 4 * rate}, "model": {"size": size}}
                found.append(made_up(Arm(variant=variant, rate=rate), seed, curve=curve, options=options))
    return found


def ended(given: list[Record], variant: str, *losses: float, **result: int) -> list[Record]:
    """Replace losses and result of every run of `variant` at the highest rate."""
    arm = Arm(variant=variant, rate=PAPER_RATES[-1])
    return [
        replace(one, curve={"step": [100, 200, 300][: len(losses)], "loss": [*losses]}, result=result)
        if one.arm == arm
        else one
        for one in given
    ]


def test_the_rates_are_the_papers_and_on_the_laptop_four_times_those() -> None:
    for preset, scale in (("paper", 1), ("laptop", 4)):
        rates = {job.config.optimizer.learning_rate for job in RECIPE.jobs(preset, [0])}  # type: ignore[attr-defined]
        assert rates == {scale * rate for rate in PAPER_RATES}
    assert RECIPE.presets["paper"].seeds == RECIPE.presets["laptop"].seeds == 5


@pytest.mark.parametrize(
    ("losses", "result", "expected"),
    [
        ([5.0, 4.0, 3.0], {}, False),
        ([5.0, 4.0, 4.4], {}, False),
        ([5.0, 4.0, 4.6], {}, True),
        ([5.0], {"diverged_at": 170}, True),
        ([], {"diverged_at": 7}, True),
    ],
)
def test_what_counts_as_diverged(losses: list[float], result: dict[str, int], expected: bool) -> None:
    curve = {"step": [100 * (at + 1) for at in range(len(losses))], "loss": losses}
    assert fig04.has_diverged_or_risen(replace(made_up("vanilla", curve=curve), result=result)) is expected


def test_the_papers_figure() -> None:
    """KV-shift is lower at every rate, and only vanilla diverges at the highest rate."""
    given = ended(records([0.02, 0.03, 0.025, 0.01, 0.02, 0.02]), "vanilla", 5.0, diverged_at=170)
    directions = [claim.direction for claim in RECIPE.claims(given) if not claim.own]
    assert directions == ["holds", "holds", "holds", "not shown", "holds"]
    assert RECIPE.claims(given)[3].ours == "a run diverged: no interval"


def test_against_the_paper() -> None:
    given = ended(records([-0.02, -0.03, -0.025, -0.01, -0.02, -0.02]), "kv-shift", 5.0, 4.0, 5.0)
    assert [claim.direction for claim in RECIPE.claims(given)][:5] == ["fails"] * 5
    assert [claim.direction for claim in RECIPE.claims(records([0.02, 0.04, -0.03, 0.0, 0.01]))][:4] == [
        "not shown"
    ] * 4


def test_three_of_three_decide_nothing_about_divergence() -> None:
    given = ended(records([0.02, 0.03, 0.025]), "vanilla", 5.0, diverged_at=170)
    assert RECIPE.claims(given)[4].direction == "not shown"


def test_where_neither_diverges_the_contrast_fails() -> None:
    last = RECIPE.claims(records([0.02, 0.03, 0.025, 0.01, 0.02, 0.02]))[4]
    assert (last.direction, last.ours) == ("fails", "in 0 of 6 seeds; vanilla diverges in 0, KV-shift in 0")


def test_a_miniature_in_which_vanilla_does_not_diverge_cannot_tell_them_apart() -> None:
    given = records([0.02, 0.03, 0.025, 0.01, 0.02, 0.02], size=None)
    assert RECIPE.claims(given)[4].direction == "not testable here"
    assert RECIPE.claims(ended(given, "vanilla", 5.0, diverged_at=170))[4].direction == "holds"


@pytest.mark.parametrize(
    ("more", "direction"),
    [([0.05, 0.06, 0.07], "holds"), ([-0.05, -0.06, -0.07], "fails"), ([0.05, -0.06, 0.02], "not shown")],
)
def test_whether_the_gain_shrinks_at_low_rates(more: list[float], direction: str) -> None:
    given = records([0.02, 0.02, 0.02])
    better = [
        replace(one, curve={**one.curve, "loss": [*one.curve["loss"][:2], one.curve["loss"][2] - more[one.seed]]})
        if one.arm == Arm(variant="kv-shift", rate=PAPER_RATES[-2])
        else one
        for one in given
    ]
    last = RECIPE.claims(better)[-1]
    assert (last.own, last.direction) == (True, direction)
    assert last.statement == "The gain is larger at the paper's rate 0.001 than at 0.0001"
    diverged = [
        replace(one, result={"diverged_at": 3}) if one.arm == Arm(variant="vanilla", rate=PAPER_RATES[0]) else one
        for one in given
    ]
    assert RECIPE.claims(diverged)[-1].direction == "not shown"
