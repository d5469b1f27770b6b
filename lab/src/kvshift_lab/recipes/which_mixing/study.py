"""KV shift beside other ways to mix a token with those before it, in runs long enough for models to copy.

`neighbours` compares some of them in runs that end before copying begins. Here, models with two layers are trained in
the setting of `decide` for 4 million tokens: long enough for models with KV shift to begin to copy, and too short for
plain attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.recipes.decide import study as decide
from kvshift_lab.recipes.decide.onset import (
    KIND_NAMES,
    InductionOnset,
    mean_text,
    plot_onset,
    tokens_per_step,
)
from kvshift_lab.recipes.which_mixing import ENTRY
from kvshift_lab.run.probes import KINDS
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.jobs import TextJob
from kvshift_lab.study.recipe import Recipe, Record, last_loss, last_mean, without_tuning_runs
from kvshift_lab.variants.by_name import with_variant

LAYERS = 2
ARMS = SHIFTED, CANON, INKLING, FOX, SMEAR, DIFFERENTIAL, VANILLA = [
    Arm(variant=variant, layers=LAYERS)
    for variant in ("kv-shift", "canon", "inkling", "fox-shift", "smear", "differential", "vanilla")
]
OTHERS = [CANON, INKLING, FOX, SMEAR, DIFFERENTIAL]
_TOKENS = 4_000_000
_LOWER_RATE = 8e-3  # of the preset of this name


def _config(preset: str) -> TrainConfig:
    config = decide.setting(preset)
    tokens = config.batch_size * config.data.sequence_length
    return replace(
        config,
        model=replace(config.model, num_hidden_layers=LAYERS),
        steps=4 if preset == "smoke" else _TOKENS // tokens,
    )


def arms(preset: str) -> list[TextJob]:
    """Return a job for each arm."""
    config = _config(preset)
    if preset == "lower_rate":
        return [_job(config, arm).at_rate(_LOWER_RATE) for arm in (SHIFTED, SMEAR, VANILLA)]
    return [_job(config, arm) for arm in ARMS]


def _job(config: TrainConfig, arm: Arm) -> TextJob:
    model = with_variant(config.model, str(arm.variant))
    if arm.variant == "differential":
        # Its norm makes heads as large at the first step as at the last, so output projections start at 0, as in its
        # paper and in Table 12.
        model = replace(model, zero_outputs=True)
    return TextJob(arm=arm, config=replace(config, model=model))


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return, for KV shift and each other mixing, which begins to copy sooner and has the lower loss; then vanilla."""
    onset = InductionOnset(records)
    others = [arm for arm in OTHERS if arm in onset.models]
    pairs = [(SHIFTED, other) for other in (*others, VANILLA)] + [(other, VANILLA) for other in others]
    return [
        *(onset.sooner_claim(ours, theirs) for ours, theirs in pairs),
        *(onset.lower_at_end_claim(ours, theirs) for ours, theirs in pairs),
    ]


def table(records: Sequence[Record]) -> str:
    """Return a Markdown table of each mixing: parameters, when it begins to copy, and its gain over vanilla by kind."""
    onset = InductionOnset(without_tuning_runs(records))
    plain = onset.models[VANILLA]
    kinds = [f"gain, {name}" for name in KIND_NAMES.values()]
    rows: list[tuple[str, ...]] = [
        ("model", "parameters more than vanilla", "begins to copy after", "loss", "gain", *kinds, "accuracy")
    ]
    for arm in _present(records):
        runs = onset.models[arm]
        parameters = (next(iter(models.values())).result["parameters"] for models in (runs, plain))
        more = next(parameters) - next(parameters)
        gains = [
            [last_mean(plain[seed], name, 1) - last_mean(runs[seed], name, 1) for seed in runs]
            for name in ("loss", *(f"loss_{kind}" for kind in KINDS))
        ]
        accuracy = statistics.fmean(last_mean(run, "repeat_accuracy", 1) for run in runs.values())
        rows.append(
            (
                arm.label,
                f"{more:,}",
                _onset_text(onset, arm),
                f"{statistics.fmean(map(last_loss, runs.values())):.3f}",
                *(["-"] * len(gains) if arm == VANILLA else map(mean_text, gains)),
                f"{100 * accuracy:.1f} %",
            )
        )
    return (
        "At the end, mean over seeds with 95 % intervals; losses in nats per token, by kind of target over positions "
        "from 64 on. The gain is vanilla's loss minus that of the model. Accuracy is that "
        f"on repeated random tokens.\n\n{as_markdown(rows, left=None)}"
    )


def _present(records: Sequence[Record]) -> list[Arm]:
    """Return the arms that have records, KV shift first."""
    there = {record.arm for record in records}
    return [arm for arm in ARMS if arm in there]


def _plot(records: Sequence[Record]) -> Figure:
    return plot_onset(_present(records), records)


def _onset_text(onset: InductionOnset, arm: Arm) -> str:
    """Return after how many tokens a model begins to copy (geometric mean), and with how many seeds."""
    steps = onset.steps_to_onset(arm)
    seeds = f"{len(steps.reached)} of {len(steps.steps)} seeds"
    if not steps.reached:
        return f"({seeds})"
    tokens = statistics.geometric_mean(steps.reached) * tokens_per_step(onset.records[0])
    return f"{tokens / 1e6:.2f} million tokens ({seeds})"


RECIPE = Recipe(
    entry=ENTRY,
    source="No figure of the paper: which mixing to use is ours to ask",
    arms=arms,
    plot=_plot,
    claims=claims,
    tables=table,
)
