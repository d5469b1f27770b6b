"""When do models begin to copy on real text, and what is the shift worth before that, at it and afterwards?

The preset `search` trains two plain layers in many settings, to find one in which they begin to copy at all; the others
train one and two layers without and with the shift in the setting that it found.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvshift.lab.analysis.accuracy import draw_chance, draw_means
from kvshift.lab.analysis.learning import Reach, compare_reach, reach_of
from kvshift.lab.analysis.panels import INTERVALS, legend_below, new_figure
from kvshift.lab.analysis.statistics import t_interval, verdict
from kvshift.lab.analysis.tables import as_markdown
from kvshift.lab.data.config import DataConfig
from kvshift.lab.training.probes import KINDS
from kvshift.lab.training.train_config import ModelConfig, OptimizerConfig
from kvshift.lab.variants.by_name import with_variant
from kvshift.recipes import phase_search
from kvshift.recipes.catalogue import CATALOGUE
from kvshift.recipes.claims import Claim, Direction, higher, sooner
from kvshift.recipes.jobs import TextJob
from kvshift.recipes.models import PAIR, model_label
from kvshift.recipes.phase_search import LEVEL, Setting, millions, tokens_per_step
from kvshift.recipes.recipe import Recipe, Record, accuracy_curve, by_label
from kvshift.recipes.tuning import least_loss

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.figure import Figure

__all__ = ["LAPTOP", "RECIPE", "SMOKE", "Changes"]

FOUND = Setting(64, 4, 4e-3, tokens=4096)
LAPTOP = replace(FOUND.config(2, apart=204_800), eval_rows=96)
PAPER = replace(
    LAPTOP,
    model=with_variant(ModelConfig(hidden_size=512, num_attention_heads=8), "vanilla"),
    data=replace(LAPTOP.data, vocab_size=8192),
    batch_size=32,
    steps=1200,
    eval_every=25,
)
SMOKE = replace(
    LAPTOP,
    model=with_variant(ModelConfig(hidden_size=16, num_attention_heads=2), "vanilla"),
    data=DataConfig(vocab_size=257, sequence_length=96),
    optimizer=OptimizerConfig(warmup_steps=1),
    steps=4,
    batch_size=2,
    eval_every=2,
    eval_rows=4,
    save_every=4,
    log_every=2,
)
CONFIGS = {"paper": PAPER, "laptop": LAPTOP, "smoke": SMOKE}
DEPTHS = (2, 1)


def jobs(preset: str, seeds: Sequence[int]) -> list[TextJob]:
    """Of the search, each setting; else one and two layers, without and with, with each seed."""
    if preset == "search":
        return [*phase_search.search_jobs(seeds)]
    config = CONFIGS[preset]
    return [
        TextJob(
            label=model_label(layers, variant),
            config=replace(
                config, seed=seed, model=with_variant(replace(config.model, num_hidden_layers=layers), variant)
            ),
        )
        for layers in DEPTHS
        for seed in seeds
        for variant in PAIR
    ]


def _is_search(records: Sequence[Record]) -> bool:
    return not {record.label for record in records} <= {
        model_label(layers, variant) for layers in DEPTHS for variant in PAIR
    }


def claims(records: Sequence[Record]) -> list[Claim]:
    """Of the search, what it found; else when models change, and the gain before, at and after that."""
    return [phase_search.claim(records)] if _is_search(records) else Changes(records).claims()


@dataclass(frozen=True)
class Changes:
    """When each model changes, and what the shift gains before, at and after that, by kind of target.

    Attributes:
        records: of one and two layers, without and with the shift.
    """

    records: Sequence[Record]

    @cached_property
    def models(self) -> dict[str, dict[int, Record]]:
        """By label and seed."""
        return by_label(self.records)

    @cached_property
    def depths(self) -> list[int]:
        """Least first."""
        return sorted(layers for layers in DEPTHS if model_label(layers, "vanilla") in self.models)

    def reach(self, label: str) -> Reach:
        """The steps of each seed to `LEVEL`."""
        return reach_of(
            {seed: accuracy_curve(record, "prefix_matching") for seed, record in self.models[label].items()}, LEVEL
        )

    def gains(self, layers: int, name: str, steps: Mapping[int, float]) -> list[float]:
        """By how much each seed's loss is lower with the shift, after so many steps of that seed.

        Args:
            layers: of both models.
            name: of the loss: "loss", or "loss_" and a kind of target.
            steps: by seed.
        """
        ours, theirs = (self.models[model_label(layers, variant)] for variant in PAIR)
        return [_at(theirs[seed], name, step) - _at(ours[seed], name, step) for seed, step in steps.items()]

    def moments(self, layers: int) -> dict[str, dict[int, float]]:
        """By name, the steps by seed; a moment that not all seeds have is left out."""
        ours, theirs = (self.reach(model_label(layers, variant)) for variant in PAIR)
        found: dict[str, Mapping[int, float | None]] = {
            "half way to KV-shift's change": {seed: step and step / 2 for seed, step in ours.steps.items()},
            "at KV-shift's change": ours.steps,
            "at vanilla's change": theirs.steps,
            "at the end": dict(theirs.within),
        }
        return {
            name: {seed: step for seed, step in steps.items() if step is not None}
            for name, steps in found.items()
            if None not in steps.values()
        }

    def claims(self) -> list[Claim]:
        """See the class."""
        found = [self._sooner(model_label(n, "kv-shift"), model_label(n, "vanilla")) for n in self.depths]
        if len(self.depths) > 1:
            least, most = self.depths[0], self.depths[-1]
            found.append(self._sooner(model_label(least, "kv-shift"), model_label(most, "vanilla")))
        for layers in self.depths:
            found += [self._gain(layers, name, steps) for name, steps in self.moments(layers).items()]
            found += [self._survives(layers), *self._where(layers)]
        if len(self.depths) > 1:
            found.append(self._one_for_two(self.depths[0], self.depths[-1]))
        return found

    def _sooner(self, ours: str, theirs: str) -> Claim:
        compared = compare_reach(self.reach(ours), self.reach(theirs), names=(ours, theirs))
        tokens = tokens_per_step(self.records[0])
        reached = [statistics.geometric_mean(r) for r in (self.reach(ours).reached, self.reach(theirs).reached) if r]
        means = " and ".join(millions(steps * tokens) for steps in reached)
        return Claim(
            statement=f"{ours}: a prefix matching of {LEVEL:g} sooner than {theirs}",
            paper="not asked",
            ours=compared.text.replace("steps", f"steps of {tokens:,} tokens", 1),
            direction=sooner(compared),
            size=f"of those that reach it, after {means} tokens" if means else "none reaches it",
            own=True,
        )

    def _gain(self, layers: int, when: str, steps: Mapping[int, float]) -> Claim:
        losses = self.gains(layers, "loss", steps)
        by_kind = {kind: self.gains(layers, f"loss_{kind}", steps) for kind in KINDS}
        return Claim(
            statement=f"{_layers(layers)}, {when}: a lower loss with KV shift",
            paper="not asked",
            ours=verdict([-gain for gain in losses]).text,
            direction=higher(losses, [0.0] * len(losses)),
            size="gain in nats: " + "; ".join(f"{_KINDS[kind]} {_mean(gains)}" for kind, gains in by_kind.items()),
            own=True,
        )

    def _survives(self, layers: int) -> Claim:
        """The question of the recipe; undecided where plain attention has not changed in all seeds."""
        theirs = self.reach(model_label(layers, "vanilla"))
        ends = dict(theirs.within)
        gains = self.gains(layers, "loss", ends)
        decided: Direction = "not shown" if theirs.missing else higher(gains, [0.0] * len(gains))
        but = f"; {theirs.text.replace('%', '% prefix matching', 1)}" if theirs.missing else ""
        return Claim(
            statement=f"{_layers(layers)}: the gain survives plain attention's own change",
            paper="not asked",
            ours=f"gain at the end {_mean(gains)}{but}",
            direction=decided,
            size="decided where vanilla changes in every seed, by the loss after the last step",
            own=True,
        )

    def _where(self, layers: int) -> list[Claim]:
        """Whether, at its end, the gain is on pairs that were seen, and plain attention is ahead on what is new."""
        ends = dict(self.reach(model_label(layers, "vanilla")).within)
        seen, new = (self.gains(layers, f"loss_{kind}", ends) for kind in ("pair_seen", "neither"))
        return [
            Claim(
                statement=f"{_layers(layers)}, at the end: the gain is larger on pairs seen in the row before than on "
                "targets that follow a new token",
                paper="not asked",
                ours=f"{_mean(seen)} against {_mean(new)}",
                direction=higher(seen, new),
                size="nats per token; positions from 64 on",
                own=True,
            ),
            Claim(
                statement=f"{_layers(layers)}, at the end: plain attention has the lower loss on targets that follow a "
                "new token",
                paper="not asked",
                ours=f"KV shift gains {_mean(new)}",
                direction=higher([0.0] * len(new), new),
                size="nats per token; positions from 64 on",
                own=True,
            ),
        ]

    def _one_for_two(self, least: int, most: int) -> Claim:
        ours, theirs = self.models[model_label(least, "kv-shift")], self.models[model_label(most, "vanilla")]
        names = (model_label(least, "kv-shift"), model_label(most, "vanilla"))
        losses = [[accuracy_curve(run, "loss")[1][-1] for run in runs.values()] for runs in (ours, theirs)]
        return Claim(
            statement=f"At the end, {names[0]}: a lower loss than {names[1]}",
            paper="not asked",
            ours=verdict([one - other for one, other in zip(*losses, strict=True)], names=names).text,
            direction=higher(losses[1], losses[0]),
            size=f"nats per token: {statistics.fmean(losses[0]):.4f} against {statistics.fmean(losses[1]):.4f}",
            own=True,
        )


_KINDS = {
    "pair_seen": "pairs seen in the row before",
    "token_seen": "first token seen, with others after it",
    "neither": "first token new in the row",
}


def _at(record: Record, name: str, step: float) -> float:
    """A curve of a run after so many steps, by a straight line between evaluations; before the first, that."""
    steps, values = accuracy_curve(record, name)
    for at in range(1, len(steps)):
        if steps[at - 1] <= step <= steps[at]:
            part = (step - steps[at - 1]) / (steps[at] - steps[at - 1])
            return values[at - 1] + part * (values[at] - values[at - 1])
    return values[0] if step < steps[0] else values[-1]


def _mean(gains: Sequence[float]) -> str:
    mean = f"{statistics.fmean(gains):+.3f}"
    if len(gains) == 1:
        return mean
    low, high = t_interval(gains)
    return f"{mean} ({low:+.3f} to {high:+.3f})"


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def plot(records: Sequence[Record]) -> Figure:
    """Of the search, how high each setting came; else prefix matching and losses by kind over tokens."""
    return phase_search.plot(records) if _is_search(records) else _plot_changes(records)


def _plot_changes(records: Sequence[Record]) -> Figure:
    changes = Changes(records)
    titles = {
        "prefix_matching": "Prefix matching: attention of the best head to the token that followed last time",
        "loss_pair_seen": "Loss where the pair of tokens was seen in the row before",
        "loss_token_seen": "Loss where the first token was seen, followed by others",
        "loss_neither": "Loss where the first token is new in the row",
    }
    labels = [model_label(layers, variant) for layers in changes.depths for variant in PAIR]
    figure, panels = new_figure(
        [*titles.values()], ylabels=["prefix matching", *["loss (nats per token)"] * 3], height=3.4
    )
    tokens = tokens_per_step(records[0])
    for axes, name in zip(panels, titles, strict=True):
        curves = {
            label: {
                seed: ([step * tokens / 1e6 for step in steps], values)
                for seed, (steps, values) in (
                    (seed, accuracy_curve(record, name)) for seed, record in changes.models[label].items()
                )
            }
            for label in labels
            if any(
                value is not None for record in changes.models[label].values() for value in record.curve.get(name, [])
            )
        }
        draw_means(axes, curves)
        lines = {line.get_label(): line for line in axes.get_lines()}
        for label in labels:
            mean = changes.reach(label).mean
            if mean is not None and label in lines:
                axes.axvline(mean * tokens / 1e6, color=lines[label].get_color(), linestyle=":", linewidth=1)
        axes.set_xlabel("million training tokens")
    draw_chance(panels[0], LEVEL, f"{LEVEL:g}, from which a model is said to have changed; upright lines: when")
    legend_below(figure, INTERVALS)
    return figure


def tables(records: Sequence[Record]) -> str:
    """Of the search, every setting; else the gains by kind of target at each moment."""
    shown = [record for record in records if record.tunes is None]
    if _is_search(shown):
        return phase_search.table(shown)
    changes = Changes(shown)
    rows: list[tuple[str, ...]] = [("model", "moment", "all targets", *_KINDS.values())]
    for layers in changes.depths:
        for name, steps in changes.moments(layers).items():
            cells = (
                _mean(changes.gains(layers, loss, steps)) for loss in ("loss", *(f"loss_{kind}" for kind in KINDS))
            )
            rows.append((_layers(layers), name, *cells))
    return f"What KV shift gains, in nats per token (95 % intervals over seeds):\n\n{as_markdown(rows, left=None)}"


RECIPE = Recipe(
    entry=CATALOGUE["phase"],
    source="No figure of the paper: its models are long past the point where attention begins to copy",
    jobs=jobs,
    plot=plot,
    claims=claims,
    tables=tables,
    tuned_by=least_loss(),
    notes=(
        "Models are probed at each evaluation (docs/probes.md). Prefix matching is the attention to the token after "
        f"the earlier occurrence, on random tokens that come twice; a model has changed where that of its best head is "
        f"{LEVEL:g}, by a straight line between evaluations. Losses by kind of target are of the same validation rows "
        "as the loss.",
        "The laptop reads English Wikipedia articles of 2014, nothing twice. After 100 steps of warm-up the learning "
        "rate is constant, so that a loss on the way is one that a shorter run would end at.",
        "How the laptop was chosen: by the search, as the cheapest setting in which two plain layers change. The "
        "search had one seed of each setting, vanilla alone, and a run ended once the model had changed.",
        "The environment variable KVSHIFT_SHARED_DATA names the folder with wiki2014-en/train-*.jsonl.xz and "
        'wiki2014-en/valid.jsonl.xz: any text of one document a line, as {"text": ...}.',
        "The preset paper is no setting of the paper either: width 512, for a GPU.",
    ),
)
