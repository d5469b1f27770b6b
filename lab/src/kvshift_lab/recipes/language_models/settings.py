"""The language models that many tables and figures of the paper share: training settings and comparisons of losses.

All recipes of the study `language_models` draw on one grid of runs, by learning rate, context length and variant. A run
that several recipes need has the same arm in each of them and is trained once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvshift_lab.data.config import DataConfig
from kvshift_lab.run.train_config import OptimizerConfig, TrainConfig
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, Direction, lower, verdict
from kvshift_lab.study.jobs import StudyJob
from kvshift_lab.study.notes import read_notes
from kvshift_lab.study.recipe import Record, by_arm, has_diverged, last_loss, paired_losses
from kvshift_lab.variants.by_name import with_variant
from kvshift_lab.variants.model_config import ModelConfig

NOTES = read_notes(Path(__file__).with_name("notes.md"))
"""Notes on all recipes of the study."""


@dataclass(frozen=True, order=True)
class GridPoint:
    """A model depth and a context length.

    Attributes:
        layers: number of layers of the model.
        length: tokens per sequence.
    """

    layers: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The training setting of one preset.

    Attributes:
        config: options of all its runs, except depth, variant, sequence length and seed.
        points: depths and lengths, the longest runs first.
        tokens_at_once: tokens per forward pass.
        validation_tokens: tokens per evaluation.
        scale: factor by which the setting is smaller than the paper's: context lengths are divided by it, and learning
            rates are multiplied by it.
    """

    config: TrainConfig
    points: Sequence[GridPoint]
    tokens_at_once: int
    validation_tokens: int
    scale: int = 1

    def at(self, point: GridPoint) -> TrainConfig:
        """Return the options at a grid point; tokens per step and per evaluation do not depend on the length."""
        config = self.config
        return replace(
            config,
            model=replace(config.model, num_hidden_layers=None if config.model.size else point.layers),
            data=replace(config.data, sequence_length=point.length),
            batch_size=self.tokens_at_once // point.length,
            eval_rows=self.validation_tokens // point.length,
        )


# By name: the variant and further model options. An RMSNorm makes the heads of differential attention as large at the
# first step as at the last, so it needs output projections that start at 0, as in the paper.
_REFINED: Mapping[str, tuple[str, dict[str, bool]]] = {
    "differential": ("differential", {"zero_outputs": True}),
    "differential-no-qk-norm": ("differential", {"zero_outputs": True, "qk_norm": False}),
}

WIKI = DataConfig(corpus="wiki2014-en/train-00.jsonl.xz", validation="wiki2014-en/valid.jsonl.xz")

# Section 7 of the paper's appendices H and N, in the setting of BlaGPT; see notes.md.
_BLAGPT = OptimizerConfig(
    learning_rate=2e-3, schedule="wsd", warmup_steps=250, decay_fraction=2000 / 5100, weight_decay=0.0, clip_norm=0.0
)
_PAPER = TrainConfig(
    out=Path(),
    model=ModelConfig(size="0.2B", rope_theta=10_000, zero_outputs=True),
    data=DataConfig(
        corpus="HuggingFaceFW/fineweb",
        hub_config="sample-10BT",
        tokenizer="openai-community/gpt2",
        validation_fraction=0.0015,
    ),
    optimizer=_BLAGPT,
    steps=5100,
    tokens_per_step=524_288,
    eval_every=125,
    save_every=500,
    log_every=25,
    report_to=(),
    progress=False,
)
_LAPTOP = replace(
    _PAPER,
    model=ModelConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, qk_norm=True, tie_word_embeddings=False
    ),
    data=WIKI,
    optimizer=replace(_BLAGPT, learning_rate=8e-3, warmup_steps=60),
    steps=400,
    tokens_per_step=None,
    eval_every=100,
    save_every=200,
    log_every=50,
)
_SMOKE = replace(
    _LAPTOP,
    model=replace(_LAPTOP.model, hidden_size=16),
    data=DataConfig(vocab_size=257),
    optimizer=replace(_BLAGPT, learning_rate=1e-3, warmup_steps=1),
    steps=4,
    eval_every=2,
    save_every=4,
    log_every=2,
)

TABLES: Mapping[str, Setting] = {
    "paper": Setting(
        config=_PAPER,
        points=tuple(GridPoint(12, length) for length in (4096, 2048, 1024, 512, 256)),
        tokens_at_once=65_536,
        validation_tokens=10_485_760,
    ),
    "laptop": Setting(
        config=_LAPTOP,
        points=(GridPoint(4, 128), GridPoint(2, 256), GridPoint(2, 128), GridPoint(2, 64)),
        tokens_at_once=2048,
        validation_tokens=49_152,
        scale=4,
    ),
    "smoke": Setting(
        config=_SMOKE, points=(GridPoint(1, 16), GridPoint(1, 8)), tokens_at_once=32, validation_tokens=64, scale=16
    ),
}

# Table 16: layers, context length, learning rate, warm-up steps, tokens per step, all tokens, sequences at once.
_TABLE_16 = {
    "1.5B": (28, 2048, 2e-4, 1000, 1_048_576, 10**10, 8),
    "2.9B": (32, 4096, 8e-4, 600, 16_777_216, 5 * 10**11, 8),
    "6.7B": (32, 2048, 2e-4, 1000, 1_048_576, 10**10, 8),
    "13B": (40, 2048, 2e-4, 1000, 2_097_152, 10**10, 8),
    "19B": (48, 12_288, 2e-4, 3000, 2_949_120, 2 * 10**11, 1),
}


def _large(size: str, part: str) -> Setting:
    layers, length, rate, warmup, step, tokens, at_once = _TABLE_16[size]
    vocabulary = 48_000 if size in ("2.9B", "19B") else 36_000
    config = TrainConfig(
        out=Path(),
        model=ModelConfig(size=size),
        data=DataConfig(
            corpus="HuggingFaceFW/fineweb-edu", hub_config=part, vocab_size=vocabulary, validation_fraction=0.001
        ),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=warmup),
        steps=tokens // step,
        tokens_per_step=step,
        eval_every=500,
        save_every=500,
        log_every=25,
        gradient_checkpointing=True,
        report_to=(),
        progress=False,
    )
    return Setting(
        config=config, points=(GridPoint(layers, length),), tokens_at_once=at_once * length, validation_tokens=2_097_152
    )


LARGE: Mapping[str, Setting] = {
    **{size: _large(size, "sample-10BT") for size in ("1.5B", "6.7B", "13B")},
    **{size: _large(size, "sample-350BT") for size in ("2.9B", "19B")},
}
"""Settings of the paper's larger models by size, from its Table 16."""


def arm_at(point: GridPoint, variant: str) -> Arm:
    """Return the arm of a variant at a grid point."""
    return Arm(variant=variant, layers=point.layers, length=point.length)


def grid_point_label(point: GridPoint) -> str:
    """Return the name of a grid point in figures and tables."""
    return Arm(layers=point.layers, length=point.length).label


def variant_label(variant: str) -> str:
    """Return the name, in figures and tables, of a variant or of one of the refined variants of this module."""
    return Arm(variant=variant).label


def arm_job(setting: Setting, point: GridPoint, variant: str) -> StudyJob:
    """Return the job that trains one variant at one grid point."""
    config = setting.at(point)
    name, options = _REFINED.get(variant, (variant, {}))
    model = replace(with_variant(config.model, name), **options)
    return StudyJob(arm=arm_at(point, variant), config=replace(config, model=model))


def arms_of(setting: Setting, variants: Sequence[str]) -> list[StudyJob]:
    """Return a job for each variant at each grid point."""
    return [arm_job(setting, point, variant) for point in setting.points for variant in variants]


def grid_points_of(records: Sequence[Record]) -> list[GridPoint]:
    """Return the grid points of the records' runs, smallest first."""
    found = {
        GridPoint(record.options["model"]["num_hidden_layers"], record.options["data"]["sequence_length"])
        for record in records
    }
    return sorted(found)


def last_losses(records: Sequence[Record], variant: str, point: GridPoint) -> dict[int, float | None]:
    """Return the final validation loss of each seed, None where the run diverged."""
    runs = by_arm(records)[arm_at(point, variant)]
    return {seed: None if has_diverged(record) else last_loss(record) for seed, record in runs.items()}


def loss_pairs(records: Sequence[Record], one: str, other: str, point: GridPoint) -> list[tuple[float, float]] | None:
    """Return the final losses of two variants, a pair for each seed; None if a run diverged: there is no interval."""
    models = by_arm(records)
    return paired_losses(models[arm_at(point, one)], models[arm_at(point, other)])


def loss_claim(
    pairs: Sequence[tuple[float, float]] | None,
    names: tuple[str, str],
    decide: Callable[[Sequence[float], Sequence[float]], Direction] = lower,
    *,
    statement: str,
    paper: str,
    note: str = "",
    own: bool = False,
) -> Claim:
    """Return a claim about pairs of losses, decided by `decide(ours, theirs)`; "not shown" if a run diverged."""
    means, text, direction = "", "a run diverged: no interval", "not shown"
    if pairs is not None:
        ours, theirs = ([pair[number] for pair in pairs] for number in (0, 1))
        means = f"nats per token: {statistics.fmean(ours):.4f} against {statistics.fmean(theirs):.4f}"
        text, direction = verdict([one - other for one, other in pairs], names=names).text, decide(ours, theirs)
    return Claim(
        statement=statement,
        paper=paper,
        ours=text,
        direction=direction,
        note="; ".join(part for part in (means, note) if part) or "-",
        own=own,
    )


def lower_loss_claims(
    records: Sequence[Record],
    pairs: Iterable[tuple[str, str]],
    paper: Callable[[str, str, GridPoint], str],
    *,
    own: bool = False,
) -> list[Claim]:
    """Return the claims that one variant has a lower loss than another, each at its best learning rate.

    There is a claim for each grid point and, if there are several, one for the mean over them, by seed: the grid points
    of one seed share their text and its order, so they are not independent.

    Args:
        records: records of the preset.
        pairs: names of the two variants of each claim.
        paper: returns the paper's words or number for a pair at a grid point.
        own: see `Claim`.
    """
    points, claims = grid_points_of(records), []
    for better, worse in pairs:
        names = (variant_label(better), variant_label(worse))
        lower = f"{names[0]} has a lower loss than {names[1]}"
        by_point = {point: loss_pairs(records, better, worse, point) for point in points}
        for point, losses in by_point.items():
            statement = f"{grid_point_label(point)}: {lower}"
            claims.append(loss_claim(losses, names, statement=statement, paper=paper(better, worse, point), own=own))
        if len(points) > 1:
            known = [losses for losses in by_point.values() if losses is not None]
            means = [
                (statistics.fmean(ours for ours, _ in of_seed), statistics.fmean(theirs for _, theirs in of_seed))
                for of_seed in zip(*known, strict=True)
            ]
            claims.append(
                loss_claim(
                    means if len(known) == len(points) else None,
                    names,
                    statement=f"Mean over {len(points)} size/context pairs, by seed: {lower}",
                    paper="not asked",
                    note="chosen after the data had been seen",
                    own=True,
                )
            )
    return claims
