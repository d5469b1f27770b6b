"""What does the shift add to a model that copies already, and does it keep copying?

A plain model first learns to copy, on sequences that repeat a span. From the same weights, models without and with the
shift, which starts as the identity, are then trained on text in the setting of `decide`. The claims precede all runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import Seeds, draw_chance, draw_means
from kvshift_lab.analysis.panels import INTERVALS, legend_below, new_figure
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.core.errors import LabError
from kvshift_lab.recipes.both_copy import ENTRY
from kvshift_lab.recipes.decide import study as decide
from kvshift_lab.recipes.decide.onset import KIND_NAMES, LEVEL, mean_text, tokens_per_step
from kvshift_lab.recipes.decide.study import MARGIN, at_least
from kvshift_lab.run.probes import KINDS
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.study.arm import Arm, layers_text
from kvshift_lab.study.claims import Claim, Direction, higher, holds_if, lower, minus, question, within
from kvshift_lab.study.continued import ContinuedJob
from kvshift_lab.study.jobs import TextJob
from kvshift_lab.study.recipe import Recipe, Record, accuracy_curve, by_arm, value_at, without_tuning_runs
from kvshift_lab.variants.by_name import VARIANTS, with_variant
from kvshift_lab.variants.model_config import ModelConfig

SPANS, RANDOM = "after repeated text", "after repeated random tokens"
_STARTS = {SPANS: "text", RANDOM: "random"}  # what is repeated; text after random tokens
_START_RATE = 4e-3
_START_LENGTH = 128
_START_MATCHING = 0.5

PLAIN, SHIFT, SCALE = "vanilla", "kv-shift", "scale alone"
_NAMES = {PLAIN: VARIANTS[PLAIN].label, SHIFT: VARIANTS[SHIFT].label, SCALE: f"{VARIANTS[SHIFT].label}, {SCALE}"}

_EARLY_TOKENS = 2_000_000
_KEPT = 0.2  # difference in prefix matching from which one model keeps copying and the other does not


@dataclass(frozen=True)
class _Size:
    """What a preset trains: depths, models, steps on random tokens, on repeated text and on text; kinds of start."""

    depths: tuple[int, ...]
    models: tuple[str, ...]
    random_steps: int
    spans_steps: int
    steps: int
    starts: tuple[str, ...] = (SPANS, RANDOM)


_STEP = decide.LAPTOP.batch_size * decide.LAPTOP.data.sequence_length  # tokens
_SIZES = {
    "smoke": _Size((1,), (PLAIN, SHIFT, SCALE), 2, 2, 4),
    "laptop": _Size((2,), (PLAIN, SHIFT, SCALE), 1500, 500, 6_000_000 // _STEP),
    "deeper": _Size((4,), (PLAIN, SHIFT, SCALE), 1500, 500, 6_000_000 // _STEP, (SPANS,)),
    "full": _Size((2, 4), (PLAIN, SHIFT, SCALE), 1500, 500, 12_000_000 // _STEP),
}


def arm_of(model: str, layers: int, start: str) -> Arm:
    """Return the arm of a model after one kind of start."""
    return Arm(variant=_variant(model), layers=layers, case=f"{SCALE}, {start}" if model == SCALE else start)


def arms(preset: str) -> list[ContinuedJob]:
    """Return a job for each depth, model and kind of start.

    Starts alternate, so that two processes do not wait for the same start model.
    """
    size = _SIZES[preset]
    return [
        _job(preset, model, layers, start) for layers in size.depths for model in size.models for start in size.starts
    ]


def _job(preset: str, model: str, layers: int, start: str) -> ContinuedJob:
    base, size = decide.setting(preset), _SIZES[preset]
    options = with_variant(ModelConfig(shift_init=None if model == PLAIN else "identity"), _variant(model))
    if model == SCALE:
        options = replace(options, freeze_shift_lags=True)
    arm, config = arm_of(model, layers, start), replace(base, model=options, steps=size.steps)
    return _after(preset, arm, config, _start(preset, layers, start), start)


def _start(preset: str, layers: int, start: str) -> TextJob:
    """Return the job of a plain model on repeated random tokens, and after that, for one kind, on repeated text."""
    base, size = decide.setting(preset), _SIZES[preset]
    plain = replace(with_variant(base.model, PLAIN), num_attention_heads=2, num_hidden_layers=layers)
    config = replace(
        base,
        model=plain if start == RANDOM else with_variant(ModelConfig(), PLAIN),
        data=replace(base.data, periodic=_STARTS[start]),
        optimizer=replace(base.optimizer, learning_rate=_START_RATE),
        steps=size.random_steps if start == RANDOM else size.spans_steps,
    )
    if preset != "smoke":
        data = replace(config.data, sequence_length=_START_LENGTH)
        config = replace(config, data=data, batch_size=_STEP // _START_LENGTH, eval_rows=48)
    arm = Arm(variant=PLAIN, layers=layers, case=f"on repeated {_STARTS[start]}")
    if start == RANDOM:
        return TextJob(arm=arm, config=config)
    return _after(preset, arm, config, _start(preset, layers, RANDOM), RANDOM)


def _after(preset: str, arm: Arm, config: TrainConfig, start: TextJob, kind: str) -> ContinuedJob:
    return ContinuedJob(
        arm=arm,
        config=config,
        start=start,
        start_name=f"{_STARTS[kind]}-{arm.layers}-layers",
        least_matching=0.0 if preset == "smoke" else _START_MATCHING,
    )


def _variant(model: str) -> str:
    return SHIFT if model == SCALE else model


@dataclass(frozen=True)
class Continued:
    """Runs from the same start models, paired by seed.

    Attributes:
        records: records of the runs on text.
    """

    records: Sequence[Record]

    @cached_property
    def models(self) -> dict[Arm, dict[int, Record]]:
        """Records by arm and seed."""
        return by_arm(self.records)

    @cached_property
    def depths(self) -> list[int]:
        """Depths of the models, shallowest first."""
        return sorted({arm.layers for arm in self.models if arm.layers is not None})

    @cached_property
    def early(self) -> float:
        """The step after two million tokens of text."""
        return _EARLY_TOKENS / tokens_per_step(self.records[0])

    def pairs(self, layers: int, start: str, ours: str = SHIFT, theirs: str = PLAIN) -> list[tuple[Record, Record]]:
        """Return the records of two models, paired by seed.

        Raises:
            LabError: the models of a pair did not start from the same weights.
        """
        one, other = (self.models.get(arm_of(model, layers, start), {}) for model in (ours, theirs))
        found = [(one[seed], other[seed]) for seed in one if seed in other]
        for first, second in found:
            if first.options["data_facts"]["init_from"] != second.options["data_facts"]["init_from"]:
                raise LabError(f"{first.arm} and {second.arm}, seed {first.seed}: the start models differ")
        return found

    def gains(
        self, layers: int, start: str, name: str = "loss", step: float | None = None, ours: str = SHIFT
    ) -> list[float]:
        """Return by how much each seed's loss is lower than without the shift.

        Args:
            layers: depth of both models.
            start: kind of start.
            name: name of the loss: "loss", or "loss_" and a kind of target.
            step: number of steps of text; None for all.
            ours: the model that is compared with plain attention.
        """
        return [_at(plain, name, step) - _at(other, name, step) for other, plain in self.pairs(layers, start, ours)]

    def mean_gains(self, start: str, name: str = "loss", step: float | None = None) -> list[float]:
        """Return the mean of `gains` over the depths, by seed."""
        return _mean_by_seed(self.gains(layers, start, name, step) for layers in self.depths)

    def lowest_matching(self, start: str) -> float:
        """Return the lowest prefix matching of any model, with and without the shift, at any evaluation."""
        pairs = [pair for layers in self.depths for pair in self.pairs(layers, start)]
        return min(value for pair in pairs for record in pair for value in matching_curve(record)[1])

    def keeps_more(self, start: str) -> list[float]:
        """Return by how much prefix matching at the end is higher with the shift, by seed, as a mean over depths."""
        return _mean_by_seed(
            [_at(shifted, "prefix_matching") - _at(plain, "prefix_matching") for shifted, plain in pairs]
            for pairs in (self.pairs(layers, start) for layers in self.depths)
        )


def matching_curve(record: Record) -> tuple[list[float], list[float]]:
    """Return steps of text and prefix matching at each, which begins with that of the start model at step 0."""
    start = record.result["start"]["curve"]["prefix_matching"][-1]
    steps, values = accuracy_curve(record, "prefix_matching")
    return [0.0, *steps], [start, *values]


def _at(record: Record, name: str, step: float | None = None) -> float:
    return value_at(record, name, math.inf if step is None else step)


def _mean_by_seed(by_depth: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.fmean(of_seed) for of_seed in zip(*by_depth, strict=True)]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims after repeated text, for models that both copy, and after repeated random tokens."""
    runs = Continued(records)
    depths = ", ".join(map(str, runs.depths))
    where = f"mean over {depths} layers" if len(runs.depths) > 1 else layers_text(runs.depths[0])
    forgetting = _forgetting(runs, where) if runs.pairs(runs.depths[0], RANDOM) else []
    return [*_both_copy(runs, where), *forgetting]


def _both_copy(runs: Continued, where: str) -> list[Claim]:
    """Return the check that both copy throughout, and the claims that are decided only if they do."""
    lowest = runs.lowest_matching(SPANS)
    both = lowest >= LEVEL
    gains, early = runs.mean_gains(SPANS), runs.mean_gains(SPANS, step=runs.early)
    seen, new = (runs.mean_gains(SPANS, f"loss_{kind}") for kind in ("pair_seen", "neither"))
    zeros = [0.0] * len(gains)

    def claim(statement: str, ours: str, direction: Direction) -> Claim:
        note = "nats per token" if both else "not decided, as not all models copy at every evaluation; nats per token"
        return question(
            statement=f"{SPANS.capitalize()}, {where}: {statement}",
            ours=ours,
            direction=direction if both else "not shown",
            note=note,
        )

    found = [
        question(
            statement=f"{SPANS.capitalize()}: models with and without the shift copy at every evaluation",
            ours=f"lowest prefix matching {lowest:.3f}",
            direction=holds_if(both),
            note=f"at least {LEVEL:g}, start models included; a check that precedes the other claims of this start",
        ),
        claim(
            f"at the end, KV shift has a loss lower by {MARGIN:g} or more",
            f"gain {mean_text(gains)}",
            at_least(gains, MARGIN),
        ),
        claim(
            f"at the end, the losses differ by less than {MARGIN:g}",
            f"gain {mean_text(gains)}",
            within(gains, zeros, margin=MARGIN),
        ),
        claim(
            "the gain is smaller at the end than after 2 million tokens",
            f"{mean_text(gains)} against {mean_text(early)}, difference {mean_text(minus(gains, early))}",
            lower(gains, early),
        ),
        claim(
            "at the end, the gain is larger on pairs seen in the row before than on targets that follow a new token",
            f"{mean_text(seen)} against {mean_text(new)}, difference {mean_text(minus(seen, new))}",
            higher(seen, new),
        ),
    ]
    lags = _mean_by_seed(
        [_at(scaled, "loss") - _at(shifted, "loss") for shifted, scaled in pairs]
        for pairs in (runs.pairs(layers, SPANS, SHIFT, SCALE) for layers in runs.depths)
    )
    if lags:
        found.append(
            claim(
                "at the end, KV shift has a lower loss than a scale of keys and values alone",
                f"gain {mean_text(lags)}",
                higher(lags, [0.0] * len(lags)),
            )
        )
    return found


def _forgetting(runs: Continued, where: str) -> list[Claim]:
    kept = runs.keeps_more(RANDOM)
    after_random, after_spans = (runs.mean_gains(start) for start in (RANDOM, SPANS))
    both = min(len(after_random), len(after_spans))
    more = minus(after_random[:both], after_spans[:both])
    return [
        question(
            statement=f"{RANDOM.capitalize()}, {where}: at the end, prefix matching is higher with the shift by "
            f"{_KEPT:g} or more",
            ours=f"higher by {mean_text(kept)}",
            direction=at_least(kept, _KEPT),
            note="the shift keeps what plain attention forgets",
        ),
        question(
            statement=f"At the end, {where}: KV shift gains more {RANDOM} than {SPANS}",
            ours=f"{mean_text(after_random)} against {mean_text(after_spans)}, difference {mean_text(more)}",
            direction=higher(more, [0.0] * len(more)),
            note="nats per token",
        ),
    ]


def tables(records: Sequence[Record]) -> str:
    """Return a table of gains and prefix matching of the reported runs, and one of the gains at equal rates."""
    return f"{_gains_table(Continued(without_tuning_runs(records)))}\n\n{_equal_rates_table(records)}"


def _compared(runs: Continued) -> list[tuple[int, str, str]]:
    """Return depth, kind of start and model of all arms that are compared with plain attention."""
    return [
        (layers, start, model)
        for start in _STARTS
        for layers in runs.depths
        for model in (SHIFT, SCALE)
        if runs.pairs(layers, start, model)
    ]


def _gains_table(runs: Continued) -> str:
    kinds = (f"{kind}, positions from 64 on" for kind in KIND_NAMES.values())
    rows: list[tuple[str, ...]] = [("start", "model", "moment", "prefix matching", "all targets", *kinds)]
    for layers, start, model in _compared(runs):
        pairs = runs.pairs(layers, start, model)
        for moment, step in (("after 2 million tokens", runs.early), ("at the end", None)):
            matching = (
                f"{statistics.fmean(_at(pair[number], 'prefix_matching', step) for pair in pairs):.2f}"
                for number in (1, 0)
            )
            losses = ("loss", *(f"loss_{kind}" for kind in KINDS))
            gains = (mean_text(runs.gains(layers, start, loss, step, model)) for loss in losses)
            rows.append((start, f"{layers_text(layers)}, {_NAMES[model]}", moment, " / ".join(matching), *gains))
    return (
        "The gain, loss of plain attention minus loss of the model, in nats per token (95 % intervals over seeds), and "
        "the mean prefix matching of the best head, of plain attention / of the model:\n\n"
        f"{as_markdown(rows, left=None)}"
    )


def _equal_rates_table(records: Sequence[Record]) -> str:
    """Return the gains of the tuning runs, in which both models of a pair have the same learning rate."""
    by_rate: dict[float, list[Record]] = {}
    for record in records:
        if record.tuning_for is not None:
            by_rate.setdefault(record.options["optimizer"]["learning_rate"], []).append(
                replace(record, arm=record.tuning_for, tuning_for=None)
            )
    rows: list[tuple[str, ...]] = [("start", "model", *(f"rate {rate:.2g}" for rate in sorted(by_rate)))]
    studies = [Continued(by_rate[rate]) for rate in sorted(by_rate)]
    for layers, start, model in _compared(studies[0]) if studies else ():
        gains = (study.gains(layers, start, ours=model) for study in studies)
        texts = (mean_text(found) if found else "" for found in gains)
        rows.append((start, f"{layers_text(layers)}, {_NAMES[model]}", *texts))
    return f"The gain at the end of the tuning runs, at equal rates (seed 1000):\n\n{as_markdown(rows, left=None)}"


def plot(records: Sequence[Record]) -> Figure:
    """Plot prefix matching and the gains by kind of target over tokens of text, in a row for each depth and start."""
    runs = Continued(records)
    places = [(layers, start) for layers in runs.depths for start in _STARTS if runs.pairs(layers, start)]
    titles = [f"{layers_text(layers)}, {start}" for layers, start in places for _ in range(2)]
    labels = ["prefix matching,\nbest head", "gain (nats per token)"] * len(places)
    figure, panels = new_figure(titles, ylabels=labels, columns=2, height=2.6)
    for (layers, start), copying, gaining in zip(places, panels[::2], panels[1::2], strict=True):
        pairs = runs.pairs(layers, start)
        copied = {SHIFT: [pair[0] for pair in pairs], PLAIN: [pair[1] for pair in pairs]}
        if scaled := runs.pairs(layers, start, SCALE):
            copied[SCALE] = [pair[0] for pair in scaled]
        draw_means(copying, {_NAMES[model]: _curves(found) for model, found in copied.items()}, limits=(0, 1))
        draw_chance(copying, LEVEL, f"{LEVEL:g}, from which a model counts as copying")
        draw_means(gaining, {name: _gain_curves(pairs, loss) for name, loss in _LOSSES.items()})
        gaining.axhline(0, color="#777777", linewidth=0.8)
        for axes in (copying, gaining):
            axes.set_xlabel("million tokens of text")
    legend_below(figure, f"{INTERVALS}; gain: loss without the shift minus loss with it")
    return figure


_LOSSES = {"all targets": "loss", **{name: f"loss_{kind}" for kind, name in KIND_NAMES.items()}}


def _curves(records: Sequence[Record]) -> Seeds:
    return {record.seed: _over_tokens(record, *matching_curve(record)) for record in records}


def _gain_curves(pairs: Sequence[tuple[Record, Record]], name: str) -> Seeds:
    """Return the gain of each pair over tokens, which begins at 0."""
    found = {}
    for shifted, plain in pairs:
        steps, losses = accuracy_curve(plain, name)
        gains = [loss - value_at(shifted, name, step) for step, loss in zip(steps, losses, strict=True)]
        found[plain.seed] = _over_tokens(plain, [0.0, *steps], [0.0, *gains])
    return found


def _over_tokens(
    record: Record, steps: Sequence[float], values: Sequence[float]
) -> tuple[list[float], Sequence[float]]:
    return [step * tokens_per_step(record) / 1e6 for step in steps], values


RECIPE = Recipe(
    entry=ENTRY,
    source='The paper\'s claim that the shift helps "when both converge" (section 4.2), for models that copy already',
    arms=arms,
    plot=plot,
    claims=claims,
    tables=tables,
)
