"""The recipe `cfg`: its jobs, its verdicts and its figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvshift_lab.recipes.cfg import study as cfg
from kvshift_lab.run.train_task import task_options
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.recipe import Record
from kvshift_lab.tasks import CFG3F, CFG3S, CFGTask
from kvshift_lab.tasks.streams import evaluation_batches

from ..study.cases import made_up

RECIPE = cfg.RECIPE
STEPS = {"step": [2, 4], "loss": [1.2, 1.1]}


def records(
    start: tuple[Sequence[float], Sequence[float]],
    prefix: tuple[Sequence[float], Sequence[float]] = ([0.3], [0.3]),
    loss: tuple[Sequence[float], Sequence[float]] = ([0.8], [0.8]),
) -> list[Record]:
    """Return runs with these shares and losses: each argument has a value per seed for KV-shift, then for vanilla."""
    found = []
    for which, label in enumerate(("KV-shift", "vanilla")):
        for seed, share in enumerate(start[which]):
            shares = {"from_start": share, "from_prefix": prefix[which][seed % len(prefix[which])]}
            answers = {name: {"share": value, "stderr": 0.01, "questions": 100} for name, value in shares.items()}
            found.append(
                made_up(
                    label,
                    seed,
                    curve=STEPS,
                    options=task_options(cfg.SMOKE),
                    answers=answers,
                    evaluation={"loss": loss[which][seed % len(loss[which])]},
                )
            )
    return found


def test_the_paper_preset_is_the_setting_of_part_1():
    config = RECIPE.jobs("paper", [0])[0].config
    assert (config.task.grammar, config.task.length, config.task.prefix) == (CFG3F, 512, 50)
    assert (config.steps, config.batch_size, config.accumulation) == (100_000, 96, 1)
    assert (config.model.hidden_size, config.model.num_hidden_layers, config.model.num_attention_heads) == (768, 12, 12)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (3e-4, 0.9, 0.98, 0.1)
    # The rate decays linearly from the end of the warm-up to the end of training.
    assert optimizer.warmup_steps == config.steps - round(config.steps * optimizer.decay_fraction)
    assert RECIPE.jobs("laptop", [0])[0].config.task.grammar == CFG3S


@pytest.mark.parametrize(
    ("ours", "theirs", "direction"),
    [
        ([0.50, 0.51, 0.50], [0.50, 0.50, 0.51], "holds"),
        ([0.70, 0.71, 0.70], [0.50, 0.50, 0.51], "fails"),
        ([0.50, 0.50, 0.51], [0.70, 0.71, 0.70], "fails"),
    ],
)
@pytest.mark.parametrize("measure", range(3))
def test_each_measure_is_judged_by_its_own_interval(
    ours: list[float], theirs: list[float], direction: str, measure: int
):
    """Records are paired by seed in any order. The margin for losses is a fifth of the margin for shares."""
    assert cfg.SHARE_MARGIN == 5 * cfg.LOSS_MARGIN
    measures = [([0.3] * len(ours), [0.3] * len(ours)) for _ in range(3)]
    scale = 0.2 if measure == 2 else 1
    measures[measure] = ([scale * value for value in ours], [scale * value for value in theirs])
    claims = RECIPE.claims(records(*measures)[::-1])
    assert [claim.own for claim in claims] == [False] * 3 + [True] * 2
    claims = claims[:3]
    assert claims[measure].direction == direction
    others = {claim.direction for at, claim in enumerate(claims) if at != measure}
    assert others == {"not shown"}  # exactly equal in all three seeds


def test_a_claim_states_both_shares_and_their_difference():
    first, second, third, *_ = RECIPE.claims(
        records(([0.5, 0.6, 0.7], [0.5, 0.5, 0.5]), ([0.25, 0.25, 0.25], [0.2] * 3), ([0.8, 0.81, 0.79], [0.8] * 3))
    )
    assert first.ours == (
        "60.0 % (95 % interval 35.2 to 84.8, 3 seeds) against 50.0 % in each of 3 seeds: "
        "+10.0 points (95 % interval -14.8 to +34.8)"
    )
    assert second.ours.endswith("+5.0 points in each of 3 seeds, which gives no interval")
    assert third.ours.startswith("no difference shown: KV-shift minus vanilla is ")


@pytest.mark.parametrize(
    ("excess", "direction"),
    [([0.01, 0.02, 0.015], "holds"), ([0.3, 0.31, 0.29], "fails"), ([0.01, 0.09, 0.05], "not shown")],
)
def test_whether_a_model_is_near_the_least_possible_loss(excess: list[float], direction: str):
    equal = ([0.3] * 3, [0.3] * 3)
    floor = cfg._floor(records(equal))
    losses = [floor + above for above in excess]
    shifted, vanilla = RECIPE.claims(records(equal, equal, (losses, [floor + 0.01, floor + 0.011, floor + 0.012])))[3:]
    assert (shifted.direction, vanilla.direction) == (direction, "holds")
    assert shifted.ours.startswith(f"{sum(excess) / 3:.4f} above it (95 % interval ")


def test_the_floor_is_that_of_the_sequences_a_run_is_evaluated_on(tmp_path: Path):
    """The rows fill batches of different sizes; a run also counts their labels by slice."""
    job = RECIPE.jobs("smoke", [3])[0]
    job = replace(job, config=replace(job.config, eval_rows=11))
    job.run(tmp_path)
    record = job.record(tmp_path)
    task = CFGTask(cfg.SMOKE.task)
    batches = evaluation_batches(task, 11, 8, seed=0)
    ids = torch.cat([batch.input_ids for batch in batches])
    counts = {
        name: sum(int((batch.slices == at).sum()) for batch in batches) for at, name in enumerate(task.slice_names)
    }
    assert record["result"]["evaluation"]["answers"] == counts
    floor = cfg._floor([Record(arm=Arm(variant="kv-shift"), seed=3, **record)])
    assert floor == pytest.approx(-float(task.grammar.window_log_probability(ids)[:, 1:].mean()), rel=1e-12)
