"""Does the gain survive depth? Models of several depths on real text, a question of the paper's reviewers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_groups, draw_means
from kvshift_lab.analysis.panels import LOSS, legend_below, new_figure
from kvshift_lab.core.statistics import verdict
from kvshift_lab.data.config import DataConfig
from kvshift_lab.recipes.depth import ENTRY
from kvshift_lab.recipes.language_models.settings import WIKI, flops_per_token
from kvshift_lab.study.arm import Arm, layers_text, pair
from kvshift_lab.study.claims import Claim, higher, lower_loss, question
from kvshift_lab.study.jobs import TextJob, pairs_of_depths
from kvshift_lab.study.recipe import Recipe, Record, accuracy_curve, by_arm, last_loss, value_at
from kvshift_lab.training.train_config import OptimizerConfig, TrainConfig
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA
from kvshift_lab.variants.model_config import ModelConfig

LAPTOP = TrainConfig(
    out=Path(),
    model=ModelConfig(hidden_size=64, num_attention_heads=4),
    data=replace(WIKI, sequence_length=128),
    optimizer=OptimizerConfig(warmup_steps=60),
    steps=600,
    batch_size=16,
    eval_every=50,
    eval_rows=384,
    save_every=300,
    log_every=50,
    report_to=(),
    progress=False,
)
PAPER = replace(
    LAPTOP,
    model=ModelConfig(hidden_size=512, num_attention_heads=8),
    data=replace(LAPTOP.data, corpus="wiki2014-en/train-*.jsonl.xz", vocab_size=8192, sequence_length=512),
    optimizer=OptimizerConfig(warmup_steps=100),
    steps=1000,
    batch_size=32,
    eval_rows=None,
)
SMOKE = replace(
    LAPTOP,
    model=ModelConfig(hidden_size=16, num_attention_heads=2),
    data=DataConfig(vocab_size=257, sequence_length=16),
    optimizer=OptimizerConfig(warmup_steps=1),
    steps=4,
    batch_size=2,
    eval_every=2,
    eval_rows=4,
    save_every=4,
    log_every=2,
)

# By preset: config and depths, the longest run first.
SIZES = {"paper": (PAPER, (16, 8, 4, 2)), "laptop": (LAPTOP, (8, 4, 2)), "smoke": (SMOKE, (2, 1))}


def arms(preset: str) -> list[TextJob]:
    """Return a job for each depth, with and without KV shift."""
    return pairs_of_depths(*SIZES[preset])


@dataclass(frozen=True)
class Losses:
    """The validation losses of one preset's models by depth and variant, one for each seed.

    Attributes:
        records: records of the preset.
    """

    records: Sequence[Record]

    @cached_property
    def depths(self) -> list[int]:
        """Depths of the models, shallowest first."""
        return sorted({int(record.options["model"]["num_hidden_layers"]) for record in self.records})

    @cached_property
    def compute(self) -> float:
        """Training FLOPs per token of the shallowest vanilla model, summed over all its steps."""
        shallowest = next(iter(self._runs(self.depths[0], "vanilla").values()))
        return shallowest.options["steps"] * flops_per_token(shallowest)

    def of(self, layers: int, variant: str, *, equal_compute: bool = False) -> list[float]:
        """Return the loss of each seed after all steps, or after the compute of the shallowest vanilla model's run."""
        runs = self._runs(layers, variant).values()
        return [at_compute(run, self.compute) if equal_compute else last_loss(run) for run in runs]

    def gains(self, layers: int, *, equal_compute: bool = False) -> list[float]:
        """Return by how much the loss of each seed is lower with KV shift."""
        ours, theirs = (self.of(layers, variant, equal_compute=equal_compute) for variant in SHIFTED_AND_VANILLA)
        return [other - one for one, other in zip(ours, theirs, strict=True)]

    def _runs(self, layers: int, variant: str) -> Mapping[int, Record]:
        return by_arm(self.records)[Arm(variant=variant, layers=layers)]


def at_compute(record: Record, compute: float) -> float:
    """Return the validation loss of a run after `compute` FLOPs, linearly interpolated between evaluations.

    Args:
        record: record of the run.
        compute: training FLOPs per token, summed over steps; beyond the last step, the last loss is returned.
    """
    return value_at(record, "loss", compute / flops_per_token(record))


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims about the gain at each depth, at equal steps and equal compute, and whether it shrinks."""
    losses = Losses(records)
    least, most = losses.depths[0], losses.depths[-1]
    steps, found = records[0].options["steps"], []
    for equal in (False, True):
        for layers in losses.depths[1:] if equal else losses.depths:
            ours, theirs = (losses.of(layers, variant, equal_compute=equal) for variant in SHIFTED_AND_VANILLA)
            when = f"With the compute of {layers_text(least)}" if equal else f"After {steps:,} steps"
            found.append(
                lower_loss(
                    f"{when}, {layers_text(layers)} with KV shift: a lower loss than {layers} without", ours, theirs
                )
            )
    if most > least:
        found += [_pooled(losses, steps), _against_depth(losses, least, most)]
    found += [_deeper_without(losses, *pair) for pair in pairwise(losses.depths)]
    return found


def _pooled(losses: Losses, steps: int) -> Claim:
    """Return the claim about the mean over depths, one value for each seed because depths share seeds."""
    gains = [statistics.fmean(of_seed) for of_seed in zip(*map(losses.gains, losses.depths), strict=True)]
    depths = ", ".join(map(str, losses.depths))
    return lower_loss(
        f"After {steps:,} steps, mean over {depths} layers, by seed: a lower loss with KV shift",
        [-gain for gain in gains],
        [0.0] * len(gains),
        note="nats per token; chosen after the data had been seen",
    )


def _against_depth(losses: Losses, least: int, most: int) -> Claim:
    """Return the question whether the gain is no smaller in the deepest than in the shallowest models, by seed."""
    shallow, deep = losses.gains(least), losses.gains(most)
    names = (f"the gain with {layers_text(most)}", f"that with {least}")
    changes = [more - less for more, less in zip(deep, shallow, strict=True)]
    means = f"{statistics.fmean(deep):.4f} against {statistics.fmean(shallow):.4f}"
    return question(
        statement=f"The gain with {layers_text(most)} is no smaller than with {least}",
        ours=f"{means}; {verdict(changes, names=names).text}",
        direction=higher(deep, shallow),
        note="of one number of steps; each variant at its best learning rate",
    )


def _deeper_without(losses: Losses, layers: int, more: int) -> Claim:
    """Return the claim that `layers` layers with the shift beat `more` layers without, at equal compute."""
    ours = losses.of(layers, "kv-shift", equal_compute=True)
    theirs = losses.of(more, "vanilla", equal_compute=True)
    names = (Arm(variant="kv-shift", layers=layers).label, Arm(variant="vanilla", layers=more).label)
    statement = f"At equal compute, {layers_text(layers)} with KV shift: a lower loss than {more} without"
    return lower_loss(statement, ours, theirs, names=names)


def plot(records: Sequence[Record]) -> Figure:
    """Plot the loss over compute at each depth, and the gain of KV shift by depth."""
    losses, models = Losses(records), by_arm(records)
    titles = ["Loss over compute", "KV-shift minus vanilla"]
    figure, (left, right) = new_figure(titles, ylabels=[LOSS, "difference (nats per token)"], height=3.8)
    arms = [arm for layers in losses.depths for arm in pair(layers=layers)]
    draw_means(left, {arm.label: {seed: _over_compute(run) for seed, run in models[arm].items()} for arm in arms})
    left.set(xlabel="training FLOPs per token, summed over steps", xscale="log")
    differences = {
        name: [[-gain for gain in losses.gains(layers, equal_compute=equal)] for layers in losses.depths]
        for name, equal in (("equal steps, 95 % interval", False), ("equal compute, 95 % interval", True))
    }
    draw_groups(right, [str(layers) for layers in losses.depths], differences, interval=True)
    right.axhline(0, color="black", linewidth=0.8)
    right.set_xlabel("layers")
    legend_below(figure)
    return figure


def _over_compute(record: Record) -> tuple[list[float], list[float]]:
    steps, losses = accuracy_curve(record, "loss")
    each = flops_per_token(record)
    return [each * step for step in steps], losses


RECIPE = Recipe(
    entry=ENTRY,
    source="No figure of the paper: whether the gain survives depth is what its reviewers asked",
    arms=arms,
    plot=plot,
    claims=claims,
)
