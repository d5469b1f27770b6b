"""Tables 6 to 13 and 15: validation losses by learning rate and context length, compared with the paper's by cell."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_groups
from kvshift_lab.analysis.panels import LOSS, legend_below, new_figure
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.core.statistics import rank_correlation
from kvshift_lab.recipes.language_models.lm_paper import LOSSES, RATES
from kvshift_lab.recipes.language_models.settings import (
    NOTES,
    TABLES,
    GridPoint,
    arm_at,
    arms_of,
    grid_point_label,
    grid_points_of,
    last_losses,
    loss_claim,
    lower_loss_claims,
    variant_label,
)
from kvshift_lab.recipes.tables import ENTRIES
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.recipe import Recipe, Record, by_arm, has_diverged, last_loss, paired_losses, without_tuning_runs
from kvshift_lab.study.tuning import by_tuned_arm

Cells = Mapping[tuple[GridPoint, float], float | None]
"""Final validation loss by grid point and learning rate; None where the run diverged."""


def by_cell(records: Sequence[Record], variant: str) -> Cells:
    """Return the losses of a variant's runs in the learning-rate search: one run per cell, as in the paper."""
    runs = by_tuned_arm([record for record in records if record.tuning_for is not None])
    return {
        (point, rate): None if has_diverged(found[0]) else last_loss(found[0])
        for point in grid_points_of(records)
        for rate, found in runs.get(arm_at(point, variant), {}).items()
    }


def side_by_side(records: Sequence[Record], variant: str) -> str:
    """Return one method's table in Markdown: our loss in each cell, and in brackets the paper's where it has one."""
    scale, points = _scale(records), grid_points_of(records)
    cells = by_cell(records, variant)
    rows = [("learning rate", *(grid_point_label(point) for point in points))]
    for rate in sorted({rate for _, rate in cells}):
        line = [_format_cell(cells.get((point, rate)), _paper_loss(variant, point, rate, scale)) for point in points]
        rows.append((f"{rate:.2g} ({_paper_rate(rate / scale):.2g})", *line))
    own = ("own best, mean over seeds",)
    for point in points:
        losses = last_losses(without_tuning_runs(records), variant, point).values()
        known = [loss for loss in losses if loss is not None]
        own += (
            _format_cell(
                statistics.fmean(known) if len(known) == len(losses) else None, _best_paper_loss(variant, point, scale)
            ),
        )
    return f"{variant_label(variant)}; in brackets what the paper has:\n\n{as_markdown([*rows, own])}"


def correlations(records: Sequence[Record], key: str, base: str = "vanilla") -> str:
    """Return as text how our cells rank against the paper's: the losses, and their differences from `base`."""
    scale = _scale(records)
    found = []
    for what, other in (("losses", None), (f"differences from {variant_label(base)}", base)):
        if other == key or (other is not None and other not in LOSSES):
            continue
        pairs = _pairs(records, key, other, scale)
        rho = rank_correlation(*zip(*pairs, strict=True)) if pairs else None
        number = "none can be made" if rho is None else f"{rho:.2f}"
        found.append(f"of the {what} {number} ({len(pairs)} cells)")
    return f"Spearman's rank correlation with the paper's cells, {variant_label(key)}: {'; '.join(found)}."


def _pairs(records: Sequence[Record], key: str, base: str | None, scale: int) -> list[tuple[float, float]]:
    """Return (our value, paper's value) for each cell that both have, at the depth that has the most lengths.

    The values are losses; with `base` they are differences from the loss of `base` in the same cell.
    """
    cells = by_cell(records, key)
    below = by_cell(records, base) if base else {}
    depths = [point.layers for point in grid_points_of(records)]
    pairs = []
    for (point, rate), loss in cells.items():
        theirs = _paper_loss(key, point, rate, scale)
        if point.layers != statistics.mode(depths) or loss is None or theirs is None:
            continue
        if base is None:
            pairs.append((loss, theirs))
            continue
        other, printed = below.get((point, rate)), _paper_loss(base, point, rate, scale)
        if other is not None and printed is not None:
            pairs.append((loss - other, theirs - printed))
    return pairs


def _scale(records: Sequence[Record]) -> int:
    """Return the ratio of the paper's context lengths to ours, looked up by the width of the models."""
    width = records[0].options["model"]["hidden_size"]
    widths = {setting.config.model.hidden_size: setting.scale for setting in TABLES.values()}
    return widths.get(width, 1)  # models given by a size of the paper have no width in their options


def _paper_rate(rate: float) -> float:
    """Return the paper's learning rate that equals `rate` up to rounding, or `rate` itself if there is none."""
    return next((known for known in RATES if abs(known - rate) < 1e-9), rate)


def _paper_loss(key: str, point: GridPoint, rate: float, scale: int) -> float | None:
    return LOSSES.get(key, {}).get((_paper_rate(rate / scale), point.length * scale))


def _best_paper_loss(key: str, point: GridPoint, scale: int) -> float | None:
    losses = [loss for (_, length), loss in LOSSES.get(key, {}).items() if length == point.length * scale]
    return min(losses, default=None)


def _format_cell(ours: float | None, theirs: float | None) -> str:
    return f"{'diverged' if ours is None else f'{ours:.4f}'} ({'-' if theirs is None else f'{theirs:.4f}'})"


def _claims(better: str, worse: Sequence[str], records: Sequence[Record]) -> list[Claim]:
    """Return the claims that `better` has a lower loss than each of `worse`, at each grid point and pooled."""
    paper = partial(_paper_text, _scale(records))
    return lower_loss_claims(records, [(better, other) for other in worse], paper)


def _paper_text(scale: int, better: str, worse: str, point: GridPoint) -> str:
    """Return the paper's best loss of each method, as text, at the context length of the grid point."""
    ours, theirs = (_best_paper_loss(key, point, scale) for key in (better, worse))
    length = point.length * scale
    if ours is None or theirs is None:
        return f"no number at {length} tokens"
    return f"at {length} tokens {ours:.4f} against {theirs:.4f}"


def _longer_context_claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims that vanilla's loss falls with longer contexts, from each length to the next at one depth."""
    scale, models = _scale(records), by_arm(records)
    claims = []
    for short, long in pairwise(grid_points_of(records)):
        if short.layers != long.layers:
            continue
        claims.append(
            loss_claim(
                paired_losses(*(models[arm_at(point, "vanilla")] for point in (long, short))),
                (f"{long.length} tokens", f"{short.length} tokens"),
                statement=f"{long.layers} layers, vanilla, after {_millions(records[0])} tokens of training: "
                f"{long.length} tokens have a lower loss than {short.length}",
                paper=f"{_best_paper_loss('vanilla', long, scale)} against "
                f"{_best_paper_loss('vanilla', short, scale)} at "
                f"{long.length * scale} and {short.length * scale} tokens",
                note="on the same tokens",
            )
        )
    return claims


def _millions(record: Record) -> str:
    tokens = record.options["steps"] * record.options["tokens_per_step"]
    return f"{tokens / 1e6:.2g} million" if tokens >= 1e5 else f"{tokens:,}"


def _plot(methods: Sequence[str], records: Sequence[Record]) -> Figure:
    """Plot the final loss of each seed and their mean with its interval, by grid point and method."""
    points = grid_points_of(records)
    figure, (axes,) = new_figure(
        ["Loss of each seed (dots), and their mean with its 95 % interval"], ylabels=[LOSS], height=3.4
    )
    losses = {
        variant_label(key): [
            [loss for loss in last_losses(records, key, point).values() if loss is not None] for point in points
        ]
        for key in methods
    }
    draw_groups(axes, [grid_point_label(point) for point in points], losses, interval=True)
    legend_below(figure)
    return figure


def _text(keys: Sequence[str], records: Sequence[Record]) -> str:
    """Return each method's table beside the paper's, with the rank correlations of their cells."""
    parts = []
    for key in keys:
        parts += [side_by_side(records, key), correlations(records, key, "mla" if key.startswith("mla") else "vanilla")]
    return "\n\n".join(parts)


def _recipe(name: str, methods: Sequence[str], *, better: str, shown: Sequence[str] | None = None) -> Recipe:
    """Return the recipe of a method's table, with the paper's claim that one method is better than the others.

    Args:
        name: name of the recipe.
        methods: all variants that are trained, the table's own first.
        better: the method that is better in the paper; if it is the only method, its context lengths are compared.
        shown: methods whose tables are shown beside the paper's; None: the first of `methods`.
    """
    others = [key for key in methods if key != better]
    return Recipe(
        entry=next(entry for entry in ENTRIES if entry.name == name),
        source=f"Table {int(name[3:])}",
        arms=lambda preset: arms_of(TABLES[preset], methods),
        plot=partial(_plot, methods),
        claims=partial(_claims, better, others) if others else _longer_context_claims,
        tables=partial(_text, shown or methods[:1]),
        notes=NOTES,
    )


RECIPES = {
    "tab06": _recipe("tab06", ["vanilla"], better="vanilla"),
    "tab07": _recipe("tab07", ["kv-shift", "vanilla"], better="kv-shift"),
    "tab08": _recipe("tab08", ["qkv-shift", "kv-shift", "vanilla"], better="kv-shift"),
    "tab09": _recipe("tab09", ["k-shift", "kv-shift", "vanilla"], better="kv-shift"),
    "tab10": _recipe("tab10", ["v-shift", "kv-shift", "vanilla"], better="kv-shift"),
    "tab11": _recipe("tab11", ["differential-no-qk-norm", "kv-shift", "vanilla"], better="kv-shift"),
    "tab12": _recipe("tab12", ["differential", "kv-shift", "vanilla"], better="kv-shift"),
    "tab13": _recipe("tab13", ["selective-key", "kv-shift", "vanilla"], better="kv-shift"),
    "tab15": _recipe("tab15", ["mla-kv-shift", "mla"], better="mla-kv-shift", shown=["mla", "mla-kv-shift"]),
}
