"""The recipes `which_mixing` and `start_values`: what their arms share, and their verdicts."""

from __future__ import annotations

from dataclasses import replace

from kvshift_lab.core.options import to_json
from kvshift_lab.recipes.keys_values.study import setting
from kvshift_lab.recipes.start_values import study as start_values
from kvshift_lab.recipes.which_mixing import study as which_mixing
from kvshift_lab.run.probes import KINDS
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.recipe import Record

from ..study.cases import directions, made_up

STEPS = [100, 200, 300, 400]


def records(arms: list[Arm], copies_at: dict[Arm, int]) -> list[Record]:
    """Return runs of six seeds, given for each arm that copies the index of the step; they have the lower loss."""
    options = to_json(setting("laptop")) | {"data_facts": {"tokens": 1024}}
    found = []
    for arm in arms:
        at = copies_at.get(arm)
        for seed in range(6):
            matching = [0.5 if at is not None and index >= at else 0.01 + 0.001 * seed for index in range(len(STEPS))]
            last = (3.7 if at is None else 3.5) + 0.01 * seed + 0.001 * (seed % 2) * (at is None)
            curve = {"step": STEPS, "prefix_matching": matching, "loss": [5.0, 4.0, 3.8, last]}
            curve |= {f"loss_{kind}": curve["loss"] for kind in KINDS} | {"repeat_accuracy": [0.0, 0.0, 0.0, 0.02]}
            found.append(made_up(arm, seed, curve=curve, options=options, parameters=1000 + 8 * (at is not None)))
    return found


def test_mixings_share_everything_but_the_model() -> None:
    jobs = which_mixing.RECIPE.jobs("laptop", [0])
    assert [job.config.model.variant for job in jobs] == [  # type: ignore[attr-defined]
        None, "canon", "inkling", "fox-shift", "smear", "differential", None,
    ]  # fmt: skip
    assert len({replace(job.config, model=setting("laptop").model) for job in jobs}) == 1  # type: ignore[attr-defined]
    assert jobs[0].config.steps * 4096 < 4_000_000 <= (jobs[0].config.steps + 1) * 4096  # type: ignore[attr-defined]


def test_at_the_lower_rate_three_of_them_differ_in_nothing_else() -> None:
    jobs = which_mixing.RECIPE.jobs("lower_rate", [0])
    laptop = {job.arm: job for job in which_mixing.RECIPE.jobs("laptop", [0])}
    assert [job.arm for job in jobs] == [which_mixing.SHIFTED, which_mixing.SMEAR, which_mixing.VANILLA]
    assert all(job == laptop[job.arm].at_rate(8e-3) for job in jobs)  # type: ignore[attr-defined]
    given = records([job.arm for job in jobs], {which_mixing.SHIFTED: 1})
    assert len(directions(which_mixing.RECIPE, given)) == 2 * 3
    assert len(which_mixing.table(given).splitlines()) == 2 + 2 + 3


def test_verdicts_on_mixings() -> None:
    given = records(which_mixing.ARMS, {which_mixing.SHIFTED: 1, which_mixing.OTHERS[0]: 2})
    found = directions(which_mixing.RECIPE, given)
    copies = "2 layers: a prefix matching of 0.2 sooner than"
    assert found[f"KV-shift, {copies} smear, 2 layers"] == "holds"
    assert found[f"Canon, {copies} vanilla, 2 layers"] == "holds"
    assert found[f"smear, {copies} vanilla, 2 layers"] == "not shown"
    assert len(found) == 2 * (6 + 5)
    row = next(line for line in which_mixing.table(given).splitlines() if line.startswith("| Canon"))
    assert "| 8 | " in row
    assert "(6 of 6 seeds)" in row


def test_starts_differ_in_their_coefficients_alone() -> None:
    jobs = start_values.RECIPE.jobs("laptop", [0])
    assert {job.config.optimizer.learning_rate for job in jobs} == {8e-3}  # type: ignore[attr-defined]
    models = [(job.config.model.variant, job.config.model.shift_init) for job in jobs]  # type: ignore[attr-defined]
    assert models == [(None, None), (None, "identity"), ("kv-shift-induction-start", None)]


def test_verdicts_on_starts() -> None:
    given = records(start_values.ARMS, {start_values.INDUCTION: 1})
    found = directions(start_values.RECIPE, given)
    assert set(found.values()) == {"holds", "not shown"}
    assert sum(verdict == "holds" for verdict in found.values()) == 4
