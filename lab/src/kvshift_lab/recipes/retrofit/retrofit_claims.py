"""Claims, table and figure of the recipe `retrofit`, from its measurements."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_groups, draw_means
from kvshift_lab.analysis.panels import INTERVALS, LOSS, legend_below, new_figure
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.core.statistics import difference_interval, t_interval, verdict
from kvshift_lab.study.claims import Claim, Direction, higher, lower_loss, question
from kvshift_lab.study.recipe import Record, accuracy_curve, by_arm, curves_by_label, without_tuning_runs

NOTHING = "nothing trained"
ALL, CONTROL, LORA, BOTH = "coefficients", "current token alone", "LoRA", "LoRA and coefficients"


@dataclass(frozen=True)
class Measurements:
    """The measurements of each trained part by seed; those of the untrained model are the same for each seed.

    Attributes:
        records: records of the preset.
    """

    records: Sequence[Record]

    @cached_property
    def by_part(self) -> Mapping[str, list[Record]]:
        """Records of each part in the order of seeds; the untrained model's record is repeated for each seed."""
        found = {arm.label: [*seeds.values()] for arm, seeds in by_arm(self.records).items()}
        return {**found, NOTHING: found[NOTHING] * len(found[ALL])}

    @property
    def parts(self) -> list[str]:
        """Labels of the parts that were trained."""
        return [label for label in (ALL, CONTROL, LORA, BOTH) if label in self.by_part]

    @property
    def texts(self) -> list[str]:
        """Names of the held-out texts; the first is of the kind that is trained on."""
        return [*self.by_part[ALL][0].result["losses"]]

    @property
    def tokens(self) -> int:
        """Number of tokens that each part was trained on."""
        return int(self.by_part[ALL][0].result["tokens"])

    def losses(self, label: str, text: str) -> list[float]:
        """Return the loss of each seed, a mean over sequences."""
        return [statistics.fmean(record.result["losses"][text]) for record in self.by_part[label]]

    def minus_untrained(self, label: str, text: str) -> list[float]:
        """Return the loss of each seed minus that of the untrained model; an empty list if the part was not trained."""
        if label not in self.by_part:
            return []
        pairs = zip(self.losses(label, text), self.losses(NOTHING, text), strict=True)
        return [after - before for after, before in pairs]

    def by_sequence(self, label: str, text: str) -> list[float]:
        """Return the loss of each sequence, a mean over seeds."""
        return [
            statistics.fmean(one) for one in zip(*(r.result["losses"][text] for r in self.by_part[label]), strict=True)
        ]

    def repeated(self, label: str, name: str) -> list[float]:
        """Return the loss or accuracy in the second half of repeated sequences, by seed."""
        return [record.result["repeated"][name] for record in self.by_part[label]]

    def induction(self, label: str) -> list[float]:
        """Return the mean score of the best induction heads, by seed."""
        return [record.result["induction"] for record in self.by_part[label]]


_LOSSES = ((ALL, NOTHING), (CONTROL, NOTHING), (ALL, CONTROL), (LORA, NOTHING), (BOTH, LORA), (ALL, LORA))
_COPYING = ((ALL, NOTHING), (ALL, CONTROL), (BOTH, LORA))


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims: losses of each part against its controls, whether the gain lasts, and copying."""
    found = Measurements(records)
    losses, copying = ([pair for pair in pairs if set(pair) <= {*found.by_part}] for pairs in (_LOSSES, _COPYING))
    return [
        *(_lower(found, text, *pair) for text in found.texts for pair in losses),
        _lasting(found),
        *(_repeats(found, *pair) for pair in copying),
        *(_induction(found, *pair) for pair in copying),
    ]


def _lower(found: Measurements, text: str, one: str, other: str) -> Claim:
    """Return the claim of a lower loss, decided only if the intervals over seeds and over sequences agree."""
    ours, theirs = found.losses(one, text), found.losses(other, text)
    pairs = zip(found.by_sequence(one, text), found.by_sequence(other, text), strict=True)
    differences = [first - second for first, second in pairs]
    low, high = t_interval(differences)
    over_sequences: Direction = "holds" if high < 0 else "fails" if low > 0 else "not shown"
    over_seeds = lower_loss(
        f"After {found.tokens:,} tokens, {one}: a lower loss on {text} than with {other}",
        ours,
        theirs,
        names=(one, other),
        note=f"nats per token: {statistics.fmean(ours):.4f} against {statistics.fmean(theirs):.4f}; over "
        f"{len(differences)} sequences {statistics.fmean(differences):+.4f} (95 % interval {low:+.4f} to {high:+.4f})",
    )
    return over_seeds if over_seeds.direction == over_sequences else replace(over_seeds, direction="not shown")


def _lasting(found: Measurements) -> Claim:
    """Return the question whether the lags add no less at the last evaluation than at the first."""
    gains = {}
    for at in (0, -1):
        all_, control = ([accuracy_curve(r, "loss")[1][at] for r in found.by_part[label]] for label in (ALL, CONTROL))
        gains[at] = [more - less for more, less in zip(control, all_, strict=True)]
    step = int(accuracy_curve(found.by_part[ALL][0], "loss")[0][0])
    first = step * found.tokens // int(found.by_part[ALL][0].options["steps"])
    changes = [last - early for last, early in zip(gains[-1], gains[0], strict=True)]
    names = ("the gain at the end", "that before")
    means = f"{statistics.fmean(gains[-1]):.4f} against {statistics.fmean(gains[0]):.4f} nats per token"
    return question(
        statement=f"The lags add no less to the current token after {found.tokens:,} tokens than after {first:,}",
        ours=f"{means}; {verdict(changes, names=names).text}",
        direction=higher(gains[-1], gains[0]) if any(changes) else "not shown",
        note="validation loss of the runs, on sequences that the other claims leave out",
    )


def _repeats(found: Measurements, one: str, other: str) -> Claim:
    ours, theirs = found.repeated(one, "loss"), found.repeated(other, "loss")
    accuracy = [statistics.fmean(found.repeated(label, "accuracy")) for label in (one, other)]
    return lower_loss(
        f"On repeated random tokens, {one}: a lower loss in the second half than with {other}",
        ours,
        theirs,
        names=(one, other),
        note=f"{statistics.fmean(ours):.3f} against {statistics.fmean(theirs):.3f} nats per token; copied "
        f"{100 * accuracy[0]:.1f} % against {100 * accuracy[1]:.1f} %",
    )


def _induction(found: Measurements, one: str, other: str) -> Claim:
    ours, theirs = found.induction(one), found.induction(other)
    differences = [first - second for first, second in zip(ours, theirs, strict=True)]
    interval = difference_interval(differences)
    over_seeds = f" (95 % interval {interval[0]:+.3f} to {interval[1]:+.3f})" if interval else ""
    return question(
        statement=f"The best induction heads score higher with {one} than with {other}",
        ours=f"mean of the best five {statistics.fmean(ours):.3f} against {statistics.fmean(theirs):.3f}: "
        f"{statistics.fmean(differences):+.3f}{over_seeds}, {len(differences)} seeds",
        direction=higher(ours, theirs),
        note="of 1; the scores of `kvshift analyze`",
    )


def tables(records: Sequence[Record]) -> str:
    """Return a table of all measurements, as means over seeds."""
    found = Measurements(without_tuning_runs(records))
    rows: list[tuple[str, ...]] = [
        ("trained", *(f"loss on {text}" for text in found.texts), "loss on repeats", "copied", "induction")
    ]
    for label in (NOTHING, *found.parts):
        means = [statistics.fmean(found.losses(label, text)) for text in found.texts]
        means.append(statistics.fmean(found.repeated(label, "loss")))
        copied, score = statistics.fmean(found.repeated(label, "accuracy")), statistics.fmean(found.induction(label))
        rows.append((label, *(f"{mean:.4f}" for mean in means), f"{100 * copied:.1f} %", f"{score:.3f}"))
    return f"Means over seeds, after {found.tokens:,} tokens:\n\n{as_markdown(rows)}"


def plot(records: Sequence[Record]) -> Figure:
    """Plot the validation loss by step, and each part's loss minus the untrained model's on each text."""
    found = Measurements(records)
    titles = [f"Validation loss while training on {found.texts[0]}", "Held-out text: trained minus untrained"]
    figure, (left, right) = new_figure(titles, ylabels=[LOSS, "difference (nats per token)"], height=3.6)
    parts, curves = (ALL, CONTROL, LORA, BOTH), curves_by_label([record for record in records if record.curve], "loss")
    draw_means(left, {label: curves.get(label, {}) for label in parts})
    differences = {label: [found.minus_untrained(label, text) for text in found.texts] for label in parts}
    draw_groups(right, found.texts, differences)
    right.axhline(0, color="black", linewidth=0.8)
    legend_below(figure, INTERVALS)
    return figure
