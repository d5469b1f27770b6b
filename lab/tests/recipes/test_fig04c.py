"""Figure 4c at doubled rates: its jobs, the rate that decides, and its verdicts."""

from __future__ import annotations

import pytest

from kvshift_lab.recipes.fig04c.study import RECIPE, rates, table
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.recipe import Record

from ..study.cases import directions, made_up


def records(vanilla: list[int], shifted: list[int]) -> list[Record]:
    """Return runs at all rates, given for each seed the index of the lowest rate at which the model diverges."""
    found = []
    for variant, lowest in (("vanilla", vanilla), ("kv-shift", shifted)):
        for seed, first in enumerate(lowest):
            for index, rate in enumerate(rates("laptop")):
                losses = [6.0, 5.5, 6.1 if index >= first else 5.4]
                curve = {"step": [40, 80, 400], "loss": losses}
                found.append(made_up(Arm(variant=variant, rate=rate), seed, curve=curve, options={"model": {}}))
    return found


def test_rates_are_doubled_without_clipping_and_qk_norm() -> None:
    jobs = RECIPE.jobs("laptop", [0])
    assert rates("laptop") == pytest.approx([0.04, 0.08, 0.16, 0.32, 0.64, 1.3])
    for job in jobs:
        assert job.config.optimizer.learning_rate == job.arm.rate  # type: ignore[attr-defined]
        assert job.config.optimizer.clip_norm == 0  # type: ignore[attr-defined]
        assert not job.config.model.qk_norm  # type: ignore[attr-defined]


FIRST = "At the lowest rate at which vanilla diverges in half of the seeds, vanilla diverges and KV-shift does not"
BY_SEED = "By seed, vanilla diverges at a lower rate than KV-shift"


@pytest.mark.parametrize(
    ("vanilla", "shifted", "at_first_rate", "by_seed"),
    [
        ([2] * 6, [4] * 6, "holds", "holds"),
        ([4] * 6, [2] * 6, "not shown", "fails"),  # where vanilla diverges, so does KV shift
        ([2, 2, 2, 4, 4, 4], [3, 3, 3, 5, 5, 5], "not shown", "holds"),  # three pairs of six differ at that rate
        ([2] * 6, [2] * 6, "not shown", "not shown"),
        ([9] * 6, [5] * 6, "not testable here", "fails"),
    ],
)
def test_verdicts(vanilla: list[int], shifted: list[int], at_first_rate: str, by_seed: str) -> None:
    found = directions(RECIPE, records(vanilla, shifted))
    assert (found.pop(FIRST), found.pop(BY_SEED)) == (at_first_rate, by_seed)
    assert [*found] == [f"At {rate:g}, KV-shift has a lower loss than vanilla" for rate in rates("laptop")]


def test_the_table_counts_runs_that_diverge() -> None:
    rows = table(records([2] * 6, [9] * 6)).splitlines()
    assert next(row for row in rows if row.startswith("| 0.16")) == "| 0.16 | 0 of 6 | 5.400 | 6 of 6 | - |"
