"""The recipe `keys_values`: its jobs, and its verdicts on which model begins to copy sooner."""

from __future__ import annotations

from dataclasses import replace

from kvshift_lab.core.options import to_json
from kvshift_lab.recipes.keys_values import study
from kvshift_lab.recipes.keys_values.study import ARMS, RECIPE
from kvshift_lab.run.probes import KINDS
from kvshift_lab.study.recipe import Record

from ..study.cases import directions, made_up

STEPS = [100, 200, 300, 400]


def records(copying: dict[str, int | None], losses: dict[str, float]) -> list[Record]:
    """Return runs of six seeds, given for each variant the index of the step at which it copies, and its last loss."""
    found = []
    for arm in ARMS:
        options = to_json(study.setting("laptop")) | {"data_facts": {"tokens": 1024}}
        for seed in range(6):
            at, last = copying[str(arm.variant)], losses[str(arm.variant)] + 0.01 * seed + 0.001 * seed % 2
            matching = [0.5 if at is not None and index >= at else 0.01 + 0.001 * seed for index in range(len(STEPS))]
            curve = {"step": STEPS, "prefix_matching": matching, "loss": [5.0, 4.0, 3.5, last]}
            curve |= {f"loss_{kind}": curve["loss"] for kind in KINDS}
            found.append(made_up(arm, seed, curve=curve, options=options))
    return found


def test_arms_differ_in_what_is_shifted_alone() -> None:
    jobs = RECIPE.jobs("laptop", [0, 1])
    targets = {job.arm.variant: job.config.model.shift_targets for job in jobs}  # type: ignore[attr-defined]
    assert targets == {"kv-shift": ("k", "v"), "k-shift": ("k",), "v-shift": ("v",)}
    plain = {replace(job.config, seed=0, model=study.setting("laptop").model) for job in jobs}  # type: ignore[attr-defined]
    assert len(plain) == 1


def test_verdicts() -> None:
    losses = {"kv-shift": 3.0, "k-shift": 3.0, "v-shift": 3.4}
    found = directions(RECIPE, records({"kv-shift": 1, "k-shift": 2, "v-shift": None}, losses))
    copies = "2 layers: a prefix matching of 0.2 sooner than"
    assert found[f"K-shift, {copies} V-shift, 2 layers"] == "holds"
    assert found[f"KV-shift, {copies} V-shift, 2 layers"] == "holds"
    assert found["At the end, KV-shift, 2 layers: a lower loss than K-shift, 2 layers"] == "not shown"
    assert len(found) == 6
