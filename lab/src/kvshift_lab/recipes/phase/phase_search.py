"""The preset `search` of `phase`: vanilla models of two or three layers in many settings, to find one that copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from transformers import TrainerCallback, TrainerControl, TrainerState

from kvshift_lab.analysis.learning import steps_to
from kvshift_lab.analysis.panels import legend_below, new_figure
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.recipes.language_models.settings import WIKI, flops_per_token
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, question, sign_test
from kvshift_lab.study.jobs import TextJob
from kvshift_lab.study.recipe import Record, accuracy_curve
from kvshift_lab.training.train_config import OptimizerConfig, TrainConfig
from kvshift_lab.variants.by_name import with_variant
from kvshift_lab.variants.model_config import ModelConfig

LEVEL = 0.2
"""Prefix matching of the best head from which on a model counts as copying."""

_LENGTH = 512
_EVAL_TOKENS = 409_600  # tokens between two evaluations of the search
_MAX_TOKENS = 25_000_000  # tokens read at most; the text has 26.8 million

BASE = TrainConfig(
    out=Path(),
    data=replace(WIKI, corpus="wiki2014-en/train-*.jsonl.xz", sequence_length=_LENGTH),
    optimizer=OptimizerConfig(warmup_steps=100, weight_decay=0.0),
    eval_rows=48,
    save_every=1000,
    log_every=100,
    report_to=(),
    progress=False,
    probes="induction",
)


@dataclass(frozen=True)
class Setting:
    """A setting in which two vanilla layers may begin to copy.

    Attributes:
        width: width of the model.
        heads: number of heads per layer.
        rate: learning rate, constant after 100 steps.
        tokens: tokens per step.
        vocabulary: vocabulary size of the BPE.
        max_tokens: number of training tokens; none is read twice.
        qk_norm: whether queries and keys are normalized.
        bias: whether the projections of attention have biases.
        layers: number of layers: two, or three for comparison.
        repeated_spans: fraction of sequences in which a span is repeated (`DataConfig.repeated_spans`).
    """

    width: int
    heads: int
    rate: float
    tokens: int = 1024
    vocabulary: int = 1024
    max_tokens: int = _MAX_TOKENS
    qk_norm: bool = False
    bias: bool = False
    layers: int = 2
    repeated_spans: float | None = None

    @property
    def label(self) -> str:
        """Description of the setting in words, without `max_tokens`."""
        size = f"width {self.width}, {self.heads} head{'s' if self.heads > 1 else ''} of {self.width // self.heads}"
        size = size if self.layers == 2 else f"{self.layers} layers, {size}"
        norm = (", QK-norm" if self.qk_norm else "") + (", biases" if self.bias else "")
        spans = "" if self.repeated_spans is None else f", spans repeated in {100 * self.repeated_spans:g} %"
        return f"{size}{norm}, BPE {self.vocabulary:,}, {self.tokens:,} tokens a step, rate {self.rate:g}{spans}"

    def config(self, *, eval_tokens: int = _EVAL_TOKENS) -> TrainConfig:
        """Return the options of a run of the vanilla model.

        Args:
            eval_tokens: tokens between two evaluations.
        """
        model = ModelConfig(
            hidden_size=self.width,
            num_attention_heads=self.heads,
            num_hidden_layers=self.layers,
            qk_norm=self.qk_norm or None,
            attention_bias=self.bias or None,
        )
        return replace(
            BASE,
            model=with_variant(model, "vanilla"),
            data=replace(BASE.data, vocab_size=self.vocabulary, repeated_spans=self.repeated_spans),
            optimizer=replace(BASE.optimizer, learning_rate=self.rate),
            steps=self.max_tokens // self.tokens,
            batch_size=self.tokens // _LENGTH,
            eval_every=eval_tokens // self.tokens,
        )


SEARCH = (
    Setting(64, 2, 4e-3),
    Setting(128, 2, 2e-3),
    Setting(64, 2, 4e-3, vocabulary=512),
    Setting(64, 2, 4e-3, qk_norm=True),
    # Text with repeated spans, in case plain text does not lead two vanilla layers to copy.
    Setting(64, 2, 4e-3, repeated_spans=0.1),
    Setting(64, 2, 4e-3, repeated_spans=0.3),
    Setting(64, 2, 4e-3, repeated_spans=1.0),
    Setting(64, 4, 4e-3, tokens=4096, repeated_spans=1.0),
    # In none of the above does the first layer ever attend to the previous token: its queries and keys have no part
    # that all tokens share. Biases are such a part; so is the first layer's output, for the second of three layers.
    Setting(64, 2, 4e-3, bias=True),
    Setting(64, 2, 4e-3, layers=3),
    Setting(64, 2, 4e-3, bias=True, repeated_spans=1.0),
)


class StopAtLevel(TrainerCallback):
    """Stops training after two evaluations in a row at which the best head's prefix matching is at least `LEVEL`."""

    def __init__(self) -> None:
        self._count = 0

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._count = self._count + 1 if metrics["eval_prefix_matching"] >= LEVEL else 0
        control.should_training_stop = control.should_training_stop or self._count == 2


@dataclass(frozen=True, kw_only=True)
class SearchJob(TextJob):
    """A `TextJob` that stops training once the model copies."""

    def callbacks(self) -> Sequence[TrainerCallback]:
        """Return a `StopAtLevel`."""
        return (StopAtLevel(),)


def search_arms() -> list[TextJob]:
    """Return a job for each setting, in the order of `SEARCH`."""
    return [SearchJob(arm=Arm(case=setting.label), config=setting.config()) for setting in SEARCH]


def tokens_to_level(record: Record) -> float | None:
    """Return the tokens read when the best head's prefix matching reached `LEVEL`, or None if it did not."""
    steps = steps_to(*accuracy_curve(record, "prefix_matching"), LEVEL)
    return None if steps is None else steps * tokens_per_step(record)


def tokens_per_step(record: Record) -> int:
    """Return the tokens per step over all processes."""
    options = record.options
    return options["tokens_per_step"] or options["batch_size"] * options["data"]["sequence_length"]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims whether any setting leads vanilla layers to copy, by depth, on plain text or repeated spans."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        layers = {2: "Two", 3: "Three"}[record.options["model"]["num_hidden_layers"]]
        text = "text with repeated spans" if record.options["data"].get("repeated_spans") else "text"
        statement = f"{layers} plain layers reach a prefix matching of {LEVEL:g} on {text}"
        groups.setdefault(statement, []).append(record)
    return [_claim(statement, tried) for statement, tried in groups.items()]


def _claim(statement: str, records: Sequence[Record]) -> Claim:
    reached = {record.arm: tokens for record in records if (tokens := tokens_to_level(record)) is not None}
    costs = {record.arm: reached[record.arm] * flops_per_token(record) for record in records if record.arm in reached}
    ours = f"in {len(reached)} of {len(records)} setting{'s' if len(records) > 1 else ''}"
    if costs:
        cheapest = min(costs, key=costs.__getitem__)
        ours += f"; the cheapest is {cheapest}: after {tokens_in_words(reached[cheapest])} tokens"
    return question(
        statement=statement,
        ours=ours,
        direction=sign_test(int(bool(reached)), int(not reached)),
        note="one seed of each setting, up to 25 million tokens, none of which is read twice",
    )


def tokens_in_words(tokens: float) -> str:
    """Return a number of tokens in words, such as "1.5 million"."""
    return f"{tokens / 1e6:.1f} million"


def plot(records: Sequence[Record]) -> Figure:
    """Plot the highest prefix matching of each setting."""
    figure, (axes,) = new_figure(
        ["Plain layers: the highest prefix matching of a head"], height=0.5 + 0.3 * len(records)
    )
    axes.title.set(horizontalalignment="right", x=1)  # the panel is narrow because of the long names of settings
    best = [max(accuracy_curve(record, "prefix_matching")[1]) for record in records]
    axes.barh(range(len(records)), best, color="tab:gray")
    axes.axvline(LEVEL, color="black", linestyle=":", label=f"{LEVEL:g}, from which a model is said to copy")
    for at, (record, value) in enumerate(zip(records, best, strict=True)):
        tokens = tokens_to_level(record)
        if tokens is None:
            text = f"not within {tokens_in_words(record.options['steps'] * tokens_per_step(record))}"
        else:
            text = f"after {tokens_in_words(tokens)}"
        axes.text(max(value, LEVEL) + 0.01, at, f"{text} tokens", va="center", fontsize=7)
    axes.set_yticks(range(len(records)), [record.arm.label for record in records], fontsize=7)
    axes.set_xlim(0, 1)
    axes.set_xlabel("attention to the token that followed last time", loc="right")
    axes.set_ylabel("setting")
    axes.invert_yaxis()
    legend_below(figure)
    return figure


def table(records: Sequence[Record]) -> str:
    """Return a table of every setting that was tried."""
    rows = [("setting", "tokens read", f"tokens to {LEVEL:g}", "highest prefix matching", "last loss")]
    for record in records:
        reached = tokens_to_level(record)
        rows.append(
            (
                record.arm.label,
                tokens_in_words(record.result["tokens"]),
                "not reached" if reached is None else tokens_in_words(reached),
                f"{max(accuracy_curve(record, 'prefix_matching')[1]):.3f}",
                f"{record.curve['loss'][-1]:.3f}",
            )
        )
    return as_markdown(rows, left=None)
