"""When models begin to copy, and the gains by kind of target at each moment, as `decide` and `keys_values` use them."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from kvshift_lab.core.options import to_json
from kvshift_lab.recipes.decide.onset import BASE, LEVEL, InductionOnset
from kvshift_lab.run.probes import KINDS
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.study.arm import Arm, pair
from kvshift_lab.study.recipe import Record

from ..study.cases import made_up

STEPS = [100 * at for at in range(1, 11)]
LOSSES = ("loss", *(f"loss_{kind}" for kind in KINDS))


def record(
    arm: Arm | str, seed: int, matching: list[float], losses: dict[str, list[float]], config: TrainConfig
) -> Record:
    options = to_json(replace(config, seed=seed)) | {"data_facts": {"tokens": 1024}}
    curve = {"step": STEPS, "prefix_matching": matching, **losses}
    return made_up(arm, seed, curve=curve, options=options, tokens=STEPS[-1] * 4096)


def rising(at: float) -> list[float]:
    """Return a curve of prefix matching that crosses `LEVEL` exactly at step `at`, or never if `at` is infinite."""
    return [0.01 if math.isinf(at) else min(1, max(0, LEVEL + (step - at) / 1000)) for step in STEPS]


def records(
    ours: list[float],
    theirs: list[float],
    gains: list[float],
    *,
    layers: tuple[int, ...] = (1, 2),
    kinds: tuple[float, float, float] = (2.0, 0.5, -0.1),
) -> list[Record]:
    """Return runs of both models in which the change and the gain of the shift are as given, by seed.

    Args:
        ours: Step at which KV-shift onset.
        theirs: Step at which vanilla onset.
        gains: Loss of vanilla minus loss of KV-shift.
        layers: Depths to make runs for.
        kinds: Gain on each kind of target, as a multiple of the gain on all.
    """
    found = []
    for number in layers:
        config = replace(BASE, model=replace(BASE.model, num_hidden_layers=number))
        for seed, (one, other, gain) in enumerate(zip(ours, theirs, gains, strict=True)):
            slope = [4 - step / 1000 + 0.01 * seed for step in STEPS]
            plain = dict.fromkeys(LOSSES, slope)
            parts = dict(zip(LOSSES, (1.0, *kinds), strict=True))
            ours_too = {name: [loss - parts[name] * gain for loss in slope] for name in LOSSES}
            args = ((one, "kv-shift", ours_too), (other, "vanilla", plain))
            for at, variant, losses in args:
                found.append(record(Arm(variant=variant, layers=number), seed, rising(at), losses, config))
    return found


SOON = [300.0, 310, 320, 330, 340, 350]
LATER = [700.0, 740, 780, 720, 760, 800]
NEVER = [math.inf] * 6
GAINS = [0.10, 0.11, 0.12, 0.13, 0.14, 0.15]


def test_the_onset_is_interpolated_between_evaluations():
    onset = InductionOnset(records([340.0], [math.inf], [0.1], layers=(2,)))
    ours, theirs = map(onset.steps_to_onset, pair(layers=2))
    assert ours.steps == {0: pytest.approx(340)}
    assert theirs.steps == {0: None}


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [(LATER, "holds"), (NEVER, "holds"), ([time / 4 for time in LATER], "fails"), ([*NEVER[:5], 200.0], "not shown")],
    ids=str,
)
def test_whether_models_with_the_shift_change_sooner(theirs: list[float], verdict: str):
    onset = InductionOnset(records(SOON, theirs, GAINS))
    for layers in (1, 2):
        claim = onset.sooner_claim(*pair(layers=layers))
        assert claim.statement.startswith("KV-shift, ")
        assert claim.direction == verdict


def directions(given: list[Record]) -> dict[str, str]:
    return {claim.statement: claim.direction for claim in InductionOnset(given).gain_location_claims(2)}


def test_where_the_gain_is():
    at_end = "2 layers, at the end:"
    larger = f"{at_end} the gain is larger on pairs seen in the row before than on targets that follow a new token"
    plain = f"{at_end} plain attention has the lower loss on targets that follow a new token"
    found = directions(records(SOON, LATER, GAINS))
    assert (found[larger], found[plain]) == ("holds", "holds")
    found = directions(records(SOON, LATER, GAINS, kinds=(1.0, 1.0, 3.0)))
    assert (found[larger], found[plain]) == ("fails", "fails")


def test_gains_at_each_moment_are_those_of_a_slow_loop():
    given = records(SOON, LATER, GAINS)
    onset = InductionOnset(given)
    moments = onset.moments(2)
    assert [*moments] == [
        "half way to KV-shift's change",
        "at KV-shift's change",
        "at vanilla's change",
        "at the end",
    ]
    for name, expected in zip(moments, ([t / 2 for t in SOON], SOON, LATER, [1000.0] * 6), strict=True):
        assert [*moments[name].values()] == pytest.approx(expected)
        for loss, part in zip(LOSSES, (1, 2, 0.5, -0.1), strict=True):
            assert onset.gains(2, loss, moments[name]) == pytest.approx([part * gain for gain in GAINS])
    assert "at vanilla's change" not in InductionOnset(records(SOON, [*LATER[:5], math.inf], GAINS)).moments(1)
    (last,) = [line for line in onset.table().splitlines() if line.startswith("| 2 layers | at the end")]
    assert f"{statistics.fmean(GAINS):+.3f}" in last
