"""The recipe `both_copy`: its jobs, which continue shared start models, its check, and its verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import to_json
from kvshift_lab.data.config import DataConfig
from kvshift_lab.recipes.both_copy import study as both_copy
from kvshift_lab.recipes.both_copy.study import PLAIN, RANDOM, SCALE, SHIFT, SPANS, arm_of
from kvshift_lab.run.finished import read_run
from kvshift_lab.run.probes import KINDS
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.continued import ContinuedJob
from kvshift_lab.study.recipe import Record
from kvshift_lab.study.run_study import job_folder

from ..study.cases import made_up

RECIPE = both_copy.RECIPE


def records(
    gains: list[float], *, after_random: list[float], lowest: float = 0.3, kept: float = 0.5, scaled: bool = True
) -> list[Record]:
    """Return runs of 4 million tokens whose last losses differ by these gains; 2 nats of it on pairs seen before."""
    found = []
    options = to_json(RECIPE.arms("laptop")[0].config) | {"data_facts": {"init_from": "same"}}
    for start, by_seed in ((SPANS, gains), (RANDOM, after_random)):
        for seed, gain in enumerate(by_seed):
            for model in (PLAIN, SHIFT, SCALE) if scaled else (PLAIN, SHIFT):
                less = gain if model == SHIFT else 0.0
                copies = lowest if start == SPANS or model == PLAIN else lowest + kept + 0.001 * seed
                losses = {
                    "loss": less,
                    **dict.fromkeys((f"loss_{kind}" for kind in KINDS), 0.0),
                    "loss_pair_seen": 2 * less,
                }
                curve = {name: [3.6 - 2 * at, 3.4 + 0.01 * seed - at] for name, at in losses.items()}
                curve |= {"step": [488, 976], "prefix_matching": [0.6, copies]}
                result = {"start": {"curve": {"prefix_matching": [0.1, 0.7]}}}
                arm = arm_of(model, 2, start)
                found.append(replace(made_up(arm, seed, curve=curve, options=options), result=result))
    return found


def verdicts(given: list[Record]) -> dict[str, str]:
    return {claim.statement: claim.direction for claim in RECIPE.claims(given)}


LARGE, SMALL = [0.02, 0.022, 0.024, 0.021], [0.001, 0.002, 0.003, 0.0]
RANDOM_GAINS = [0.1, 0.12, 0.11, 0.13]

ENOUGH = "After repeated text, 2 layers: at the end, KV shift has a loss lower by 0.01 or more"
EQUAL = "After repeated text, 2 layers: at the end, the losses differ by less than 0.01"
SHRINKS = "After repeated text, 2 layers: the gain is smaller at the end than after 2 million tokens"
BOTH = "After repeated text: models with and without the shift copy at every evaluation"
SCALED = "After repeated text, 2 layers: at the end, KV shift has a lower loss than a scale of keys and values alone"
KEPT = "After repeated random tokens, 2 layers: at the end, prefix matching is higher with the shift by 0.2 or more"
MORE = "At the end, 2 layers: KV shift gains more after repeated random tokens than after repeated text"


def test_a_gain_remains():
    found = verdicts(records(LARGE, after_random=RANDOM_GAINS))
    assert {found[name] for name in (BOTH, ENOUGH, SHRINKS, SCALED, KEPT, MORE)} == {"holds"}
    assert found[EQUAL] == "fails"


def test_no_useful_gain_remains():
    found = verdicts(records(SMALL, after_random=[0.0, 0.003, 0.001, 0.002], kept=0.1))
    assert (found[ENOUGH], found[EQUAL], found[KEPT], found[MORE]) == ("fails", "holds", "fails", "not shown")


def test_one_model_that_does_not_copy_leaves_its_claims_undecided():
    found = verdicts(records(LARGE, after_random=RANDOM_GAINS, lowest=0.19))
    assert found[BOTH] == "fails"
    assert {found[name] for name in (ENOUGH, EQUAL, SHRINKS, SCALED)} == {"not shown"}
    assert found[KEPT] == "holds"


def test_the_control_is_claimed_where_it_was_run():
    assert SCALED not in verdicts(records(LARGE, after_random=RANDOM_GAINS, scaled=False))


def test_without_random_starts_nothing_is_claimed_of_them():
    given = [record for record in records(LARGE, after_random=RANDOM_GAINS) if SPANS in record.arm.label]
    found = verdicts(given)
    assert BOTH in found
    assert not {KEPT, MORE} & found.keys()
    assert RANDOM not in RECIPE.tables(given)
    assert {job.arm.case for job in RECIPE.arms("deeper")} == {SPANS, f"{SCALE}, {SPANS}"}


def test_models_of_a_pair_started_from_the_same_weights():
    given = records(LARGE, after_random=RANDOM_GAINS)
    other = {**given[1].options, "data_facts": {"init_from": "other"}}
    with pytest.raises(LabError, match="seed 0: the start models differ"):
        RECIPE.claims([given[0], replace(given[1], options=other), *given[2:]])


def test_the_gain_begins_at_zero_and_copying_at_that_of_the_start_model():
    given = records(LARGE, after_random=RANDOM_GAINS)
    steps, values = both_copy.matching_curve(given[0])
    assert (steps, values) == ([0.0, 488.0, 976.0], [0.7, 0.6, 0.3])


def test_arms_continue_one_start_model_from_which_they_do_not_differ(tmp_path: Path):
    jobs = [job for job in RECIPE.jobs("smoke", [3]) if SPANS in job.arm.label]
    folders = [job_folder(tmp_path, job) for job in jobs]
    for job, out in zip(jobs, folders, strict=True):
        assert not job.is_finished(out)
        job.run(out)
        assert job.is_finished(out)
        assert job.other_options(job.record(out)["options"]) == []
        more = replace(job, start=replace(job.start, config=replace(job.start.config, steps=99)))
        with pytest.raises(LabError, match=r"steps: recorded .*, given 99"):
            more.is_finished(out)
        with pytest.raises(LabError, match=r"began from .*, whose prefix matching is 0\.\d\d; now it must be 0\.99"):
            replace(job, least_matching=0.99).is_finished(out)
    starts = sorted(path.parts[-3] for path in tmp_path.glob("start/*/seed-3/result.json"))
    assert starts == ["random-1-layers", "text-1-layers"]

    plain, shift, scale = (job.record(out) for job, out in zip(jobs, folders, strict=True))
    assert len({record["options"]["data_facts"]["init_from"] for record in (plain, shift, scale)}) == 1
    assert len({record["config_hash"] for record in (plain, shift, scale)}) == 3
    assert str(tmp_path) not in str((plain, shift, scale))
    assert shift["result"]["start"]["options"]["data"]["periodic"] == "text"
    assert shift["result"]["start"]["curve"]["prefix_matching"]
    assert shift["result"]["start"]["start"]["options"]["data"]["periodic"] == "random"

    weights = load_file(folders[2] / "model" / "model.safetensors")
    coefficients = [tensor for name, tensor in weights.items() if name.endswith((".alpha", ".beta"))]
    assert coefficients
    for tensor in coefficients:
        assert (tensor[:, 0] != 1).all()
        assert (tensor[:, 1] == 0).all()
    first = read_run(folders[0]).series("eval", "step", "loss")
    assert first[0] == [2, 4]


def test_all_stages_read_the_bundled_text_or_none_does():
    first: Any = RECIPE.jobs("laptop", [0])[0]
    job = first.on_bundled_text()
    while True:
        assert job.config.data.corpus == DataConfig().corpus
        assert job.text_files() == ()
        if not isinstance(job, ContinuedJob):
            break
        job = job.start


def test_records_of_another_start_are_not_taken(tmp_path: Path):
    job = RECIPE.jobs("smoke", [0])[0]
    options = to_json(job.config) | {"init_from": "text-1-layers 0123456789abcdef"}
    assert "init_from" in job.other_options(options)[0]


def test_a_claim_of_every_kind_is_made_before_any_run():
    found: list[Claim] = [*RECIPE.claims(records(LARGE, after_random=RANDOM_GAINS))]
    assert len(found) == 8
    assert all(claim.own for claim in found)
