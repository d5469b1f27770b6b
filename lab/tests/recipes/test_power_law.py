"""Figures 5 and 6: the runs at each size, and the verdicts on the power law and on training for more tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvshift_lab.core.options import to_json
from kvshift_lab.recipes.catalogue import find_recipe
from kvshift_lab.recipes.scaling.power_law import SIZES, parameters_of
from kvshift_lab.study.recipe import Record

from ..study.cases import directions, made_up

FIG05, FIG06 = find_recipe("fig05"), find_recipe("fig06")


def records(
    gain: float = 0.02, *, faster: float = 0.0, late: float = 0.02, seeds: int = 3, noise: float = 0.001
) -> list[Record]:
    """Return laptop runs with losses (1e14 / N)^0.07, which KV shift multiplies by e^-gain and (N / 2e4)^-faster.

    In the long runs the gain is 0.02 after a third of the steps and `late` at the end.
    """
    found = []
    jobs: Any = FIG06.jobs("laptop", range(seeds))
    for number, job in enumerate(jobs):
        options = to_json(job.config) | {"data_facts": {"tokens": 1024}}
        one = made_up(job.arm.label, job.seed, options=options)
        size, steps = parameters_of(one), job.config.steps
        loss = (1e14 / size) ** 0.07 * (1 + noise * ((number * 7) % 5 - 2)) + 0.01 * job.seed
        shifts = bool(job.config.model.shift_targets)
        early = end = loss * (math.exp(-gain) * (size / 2e4) ** -faster if shifts else 1.0)
        if steps == 1200:
            early, end = (3.3 - 0.02, 3.0 - late - 0.001 * job.seed) if shifts else (3.3, 3.0)
        curve = {"step": [steps // 3, 2 * steps // 3, steps], "loss": [early, (early + end) / 2, end]}
        found.append(replace(one, curve=curve))
    return found


@pytest.mark.parametrize("preset", ["smoke", "laptop", "paper"])
def test_figure_6_has_all_runs_of_figure_5(preset: str) -> None:
    jobs: Any = FIG06.jobs(preset, [0, 7])
    assert len(jobs) == 4 * (len(SIZES[preset][0]) + 1)
    some: Any = FIG05.jobs(preset, [0, 7])
    shared = {(job.arm.label, repr(job.config)) for job in some}
    assert shared < {(job.arm.label, repr(job.config)) for job in jobs}


def test_at_least_five_sizes_are_fitted_on_the_same_tokens() -> None:
    for preset in ("laptop", "paper"):
        configs = SIZES[preset][0].values()
        assert len(configs) == 5
    tokens = {config.steps * config.batch_size * config.data.sequence_length for config in SIZES["laptop"][0].values()}
    assert tokens == {400 * 2048}
    paper = SIZES["paper"][0]
    assert all(abs(config.steps * (config.tokens_per_step or 0) / 1e10 - 1) < 1e-3 for config in paper.values())


def test_embeddings_and_coefficients_are_no_part_of_the_size() -> None:
    sizes = {one.arm.label: parameters_of(one) for one in records()}
    # 4 E^2 + 3 E F + 2 E per layer, with F = 8/3 E rounded up to a multiple of 32, and E for the last norm
    assert sizes["vanilla, 2 layers of width 32"] == 2 * (4 * 32**2 + 3 * 32 * 96 + 64) + 32
    assert sizes["KV-shift, 2 layers of width 32"] == sizes["vanilla, 2 layers of width 32"]
    assert sizes["vanilla, 5 layers of width 128"] / sizes["vanilla, 2 layers of width 32"] > 30


def test_what_was_put_in_comes_out() -> None:
    found = directions(FIG06, records(gain=0.02, faster=0.01))
    assert found["KV-shift has a lower loss than vanilla at every size"] == "holds"
    assert found["L(N) = (N_c / N)^a falls faster with KV-shift"] == "holds"
    assert found["Extrapolated to ten times the largest size, KV-shift still has the lower loss"] == "holds"


def test_against_the_paper() -> None:
    given = records(gain=-0.02, faster=-0.01, late=0.01)
    found = directions(FIG06, given)
    assert list(found.values())[:3] == ["fails", "fails", "fails"]
    assert found[
        "4 layers of width 64, 1200 steps: the gain of KV-shift is no smaller than after a third of the tokens"
    ] == ("fails")
    assert {claim.direction for claim in FIG05.claims(given)} == {"fails"}


@pytest.mark.parametrize("curve", [{"step": [133], "loss": [9.0]}, {"step": [], "loss": []}], ids=["late", "at once"])
def test_a_run_that_diverged_decides_nothing(curve: Mapping[str, Any]) -> None:
    given = records(seeds=4)
    place = next(number for number, one in enumerate(given) if one.seed == 1)
    given[place] = replace(given[place], curve=curve, result={"diverged_at": 170})
    for recipe in (FIG05, FIG06):
        (claim,) = recipe.claims(given)
        assert claim.direction == "not shown"
        assert claim.ours == f"runs diverged: {given[place].arm}, seed 1"
        recipe.plot(given)


def test_where_a_run_of_every_seed_diverged_there_is_still_a_figure() -> None:
    given = [replace(one, result={"diverged_at": 170}) for one in records()]
    for recipe in (FIG05, FIG06):
        assert recipe.claims(given)[0].direction == "not shown"
        assert "every seed" in recipe.plot(given).axes[0].get_title()


def test_what_noise_hides_is_not_shown() -> None:
    found = directions(FIG06, records(gain=0.0, noise=0.01))
    assert list(found.values())[:3] == ["not shown"] * 3


def test_exponents_differ_where_seeds_say_so_however_many_runs_there_are() -> None:
    much, little = records(gain=0.0, faster=0.02), records(gain=0.0, faster=0.004)
    for few, expected in (([], "holds"), ([2], "not shown")):
        given = [less if less.seed in few else more for more, less in zip(much, little, strict=True)]
        assert directions(FIG06, given)["L(N) = (N_c / N)^a falls faster with KV-shift"] == expected


def test_questions_of_ours_are_named() -> None:
    claims = FIG06.claims(records(faster=0.01))
    assert [claim.own for claim in claims] == [False, True, True, False]
    assert "the exponents differ by 0.0" in claims[1].ours
