"""Figure 8: its schedule, the measurement of errors, its verdicts and its figure, and one complete run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvshift_lab.core.atomic import read_json
from kvshift_lab.core.options import to_json
from kvshift_lab.recipes.fig08 import study as fig08
from kvshift_lab.recipes.fig08.study import HOPS, PUBLISHED, errors_by_hops
from kvshift_lab.study.arm import arm_from_label
from kvshift_lab.study.recipe import Record
from kvshift_lab.tasks import HopConfig, HopTask, batch_generator
from kvshift_lab.variants.building import build_model, describe

from ..study.cases import made_up, ran

RECIPE = fig08.RECIPE


def records(
    preset: str, layers: int, ours: list[float], theirs: list[float], *, on: dict[int, float] | None = None
) -> list[Record]:
    """Return runs with one error for all k; with dropout it is `on[k]`, if given, plus 0.001 times the seed."""
    config = fig08.SIZES[preset][0][layers]
    model = {"family": "gpt2", "layers": layers, "width": fig08.SIZES[preset][1]}
    options = {"task": {"name": "hop", **to_json(config.task)}, "model": model, "steps": config.steps}
    return [
        made_up(
            f"{kind}, {layers} layers",
            seed,
            options=options,
            errors={
                "rows": 10,
                "off": {str(hops): value for hops in range(1, config.task.max_hops + 1)},
                "on": {
                    str(hops): (on or {}).get(hops, value) + 0.001 * seed for hops in range(1, config.task.max_hops + 1)
                },
            },
        )
        for kind, values in (("KV-shift", ours), ("vanilla", theirs))
        for seed, value in enumerate(values)
    ]


def rate(config, step: int) -> float:
    """Return the learning rate of step `step` + 1 according to the documentation of OptimizerConfig."""
    steps, optimizer = config.steps, config.optimizer
    decay = round(steps * optimizer.decay_fraction)
    if step < config.warmup_steps:
        return optimizer.learning_rate * step / config.warmup_steps
    left = min(1.0, (steps - step) / decay)
    return optimizer.learning_rate * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * left)


def test_the_paper_preset_has_the_published_schedule():
    """After 1,000 steps of warm-up, rates fall linearly to 0 at step 100,001 (six layers: 200,001, and half is run)."""
    for step in (1000, 50_000, 99_999):
        assert rate(fig08.PAPER, step) == pytest.approx(1e-4 * (100_001 - step) / 99_001, rel=1e-6)
        assert rate(fig08.SIX_LAYERS, step) == pytest.approx(1e-4 * (200_001 - step) / 199_001, rel=1e-6)
    for config in (fig08.PAPER, fig08.SIX_LAYERS):
        assert (config.batch_size, config.optimizer.weight_decay, config.optimizer.beta2) == (32, 0.01, 0.999)
    (job,) = [job for job in RECIPE.jobs("paper", [0]) if job.arm.label == "vanilla, 5 layers"]
    task = HopTask(job.config.task)
    assert (task.length, task.vocab_size) == (100, 23)
    model = build_model(describe(job.config.model, vocab_size=23, length=100), seed=0)
    assert (model.config.n_embd, model.config.n_head, model.config.n_layer) == (128, 4, 5)
    assert {model.config.resid_pdrop, model.config.attn_pdrop, model.config.embd_pdrop} == {0.1}


class Oracle(torch.nn.Module):
    """A model that answers all questions correctly, except position 9 if k = 2; in training mode all are wrong."""

    def __init__(self, task: HopTask) -> None:
        super().__init__()
        self.task, self.rows = task, {}

    def learn(self, config: HopConfig, rows: int) -> None:
        for hops in range(1, config.max_hops + 1):
            task = HopTask(replace(config, hops=hops))
            batch = task.batch(batch_generator("evaluation", 1, hops * 10_000), rows)
            self.rows |= {
                tuple(ids.tolist()): labels for ids, labels in zip(batch.input_ids, batch.labels, strict=True)
            }

    def forward(self, input_ids: torch.Tensor, use_cache: bool):
        labels = torch.stack([self.rows[tuple(ids.tolist())] for ids in input_ids])
        answers = labels.roll(-1, 1).clamp(min=0)
        if self.training:
            answers = (answers + 1) % self.task.vocab_size
        two = input_ids[:, :1] == 2
        answers = torch.where(two & (torch.arange(input_ids.shape[1]) == 9), 0, answers)
        logits = torch.nn.functional.one_hot(answers, self.task.vocab_size).float()
        return type("Output", (), {"logits": logits})


def test_errors_are_those_of_defined_targets_at_each_k():
    config = HopConfig(letters=9, max_hops=3)
    model = Oracle(HopTask(config)).eval()
    model.learn(config, 20)
    errors = errors_by_hops(model, config, 20, torch.device("cpu"))
    assert errors["rows"] == 20
    assert errors["off"]["1"] == errors["off"]["3"] == 0
    task = HopTask(replace(config, hops=2))
    slices = task.batch(batch_generator("evaluation", 1, 20_000), 20).slices
    defined = slices == 2
    assert errors["off"]["2"] == pytest.approx(int(defined[:, 10].sum()) / int(defined.sum()))
    assert errors["on"] == {"1": 1.0, "2": 1.0, "3": 1.0}
    assert not model.training


def test_errors_repeat_and_leave_the_random_state():
    config = HopConfig(letters=9, max_hops=2)
    model = build_model(describe(RECIPE.jobs("smoke", [0])[0].config.model, vocab_size=9, length=11), seed=0)
    state = torch.get_rng_state()
    first, second = (errors_by_hops(model, config, 7, torch.device("cpu")) for _ in range(2))
    assert first == second
    assert first["on"] != first["off"]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("ours", "theirs", "direction"),
    [
        ([0.1, 0.12, 0.11], [0.5, 0.53, 0.5], "holds"),
        ([0.5, 0.53, 0.5], [0.1, 0.12, 0.11], "fails"),
    ],
)
def test_fewer_errors_by_the_interval_of_the_pairs(ours: list[float], theirs: list[float], direction: str):
    two, three, largest, *_ = RECIPE.claims(
        [*records("laptop", 3, ours, theirs), *records("laptop", 2, [0.6] * len(ours), [0.6] * len(ours))]
    )
    assert two.statement.startswith("With 2 layers")
    assert two.direction == "not shown"
    assert three.direction == largest.direction == direction
    assert "k = 4" in largest.statement
    assert "3 layers" in largest.statement


@pytest.mark.parametrize(
    ("by_depth", "direction"),
    [
        ({2: [0.6, 0.61], 3: [0.3, 0.305]}, "holds"),
        ({2: [0.3, 0.305], 3: [0.6, 0.61]}, "fails"),
        ({2: [0.6, 0.1], 3: [0.3, 0.3]}, "not shown"),
    ],
    ids=str,
)
def test_deeper_is_better_where_every_step_is(by_depth: dict, direction: str):
    given = [record for layers, values in by_depth.items() for record in records("laptop", layers, values, [0.5, 0.5])]
    *_, ours, theirs = (claim for claim in RECIPE.claims(given) if not claim.own)
    assert (ours.direction, theirs.direction) == (direction, "not shown")


def test_published_errors_are_met_by_the_spread_of_our_seeds():
    published = dict(zip(HOPS, PUBLISHED[5], strict=True))
    near = {hops: error - 0.001 for hops, error in published.items()}  # the mean of seeds 0, 1, 2 is as published
    far = {**near, 16: 0.5}
    for on, direction, note in ((near, "holds", "7 of 7"), (far, "fails", "6 of 7")):
        claim = RECIPE.claims(records("paper", 5, [0.1] * 3, [0.2] * 3, on=on))[-1]
        assert claim.statement.startswith("Vanilla with 5 layers: the error rate matches the paper")
        assert claim.direction == direction
        assert claim.note.startswith(note)
    assert RECIPE.claims(records("paper", 5, [0.1], [0.2], on=near))[-1].direction == "not shown"
    assert "published" not in RECIPE.claims(records("laptop", 3, [0.1] * 3, [0.2] * 3))[-1].statement


def test_a_run_of_smoke(tmp_path: Path):
    job = RECIPE.jobs("smoke", [3])[-1]
    assert job.arm.label == "vanilla, 2 layers"
    record = ran(job, tmp_path)
    errors = record.result["errors"]
    assert set(errors["off"]) == set(errors["on"]) == {"1", "2"}
    assert errors["rows"] == 10
    assert all(0 <= error <= 1 for error in errors["off"].values())
    assert record.curve["step"] == [2, 4]

    (tmp_path / "errors.json").unlink()  # as if killed between training and measurement
    assert not job.is_finished(tmp_path)
    before = read_json(tmp_path / "result.json")
    job.run(tmp_path)
    assert read_json(tmp_path / "result.json") == before
    assert job.record(tmp_path)["result"]["errors"] == errors
    claims = RECIPE.claims([record, replace(record, arm=arm_from_label("KV-shift, 2 layers"))])
    assert [claim.direction for claim in claims] == ["not shown"] * 2


def test_what_nobody_errs_in_is_said_without_an_interval():
    nearly = [0.0, 0.0, 3e-5]
    kept = [*records("laptop", 2, [0.1, 0.2, 0.15], [0.3, 0.4, 0.35]), *records("laptop", 3, nearly, [0.0, 0.0, 0.0])]
    found = {claim.statement: claim for claim in RECIPE.claims(kept)}
    both = found["With 3 layers, KV shift makes fewer errors over k = 1 ... 4"]
    assert both.ours == "at most 0.003 % in each of 3 seeds against 0.0 % in each of 3 seeds"
    assert both.direction == "not shown"
    deeper = found["Each greater depth makes fewer errors, with KV shift"].ours
    assert deeper.endswith("; at most 0.003 % in each of 3 seeds with 3")
    assert found["2 layers with KV shift make fewer errors than 3 without"].direction == "fails"
    assert "points" in found["With 2 layers, KV shift makes fewer errors over k = 1 ... 4"].ours
