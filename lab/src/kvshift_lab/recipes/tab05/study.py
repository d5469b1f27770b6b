"""Table 5 and Appendix F: to which side the coefficients of the KV heads lean, over training and at its end."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_chance, draw_curves
from kvshift_lab.analysis.maps import coefficient_counts
from kvshift_lab.analysis.panels import legend_below, new_figure
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.recipes.language_models.settings import (
    LARGE,
    NOTES,
    TABLES,
    arm_at,
    arms_of,
    grid_point_label,
    grid_points_of,
)
from kvshift_lab.recipes.tab05 import ENTRY
from kvshift_lab.study.claims import Claim, higher, not_testable, percent
from kvshift_lab.study.jobs import StudyJob
from kvshift_lab.study.recipe import Recipe, Record, accuracy_curve, by_arm, has_diverged, without_tuning_runs

# The cells of Table 5, named as in `coefficient_counts`, with the paper's counts.
CELLS = {
    "alpha1 > alpha2, beta1 > beta2": 50,
    "alpha1 <= alpha2, beta1 > beta2": 17,
    "alpha1 > alpha2, beta1 <= beta2": 9,
    "alpha1 <= alpha2, beta1 <= beta2": 52,
}
DIAGONAL = ("alpha1 > alpha2, beta1 > beta2", "alpha1 <= alpha2, beta1 <= beta2")
PAPER_SHARE = sum(CELLS[cell] for cell in DIAGONAL) / sum(CELLS.values())
PAPER = f"102 of 128 heads ({100 * PAPER_SHARE:.1f} %)"
"""The paper's KV heads with alpha1 > alpha2 exactly when beta1 > beta2."""
_NEGATIVE = tuple(f"negative {name}" for name in ("alpha1", "alpha2", "beta1", "beta2"))
_SUMS = tuple(f"distance of {name}1 + {name}2 from 1" for name in ("alpha", "beta"))


def arms(preset: str) -> list[StudyJob]:
    """Return jobs of KV shift alone: the runs of Table 7, on laptop only at length 128; on paper the 2.9B model."""
    setting = TABLES[preset] if preset != "paper" else LARGE["2.9B"]
    if preset == "laptop":
        setting = replace(setting, points=[point for point in setting.points if point.length == 128])
    return arms_of(setting, ["kv-shift"])


def share_on_diagonal(layers: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the KV heads on the diagonal of Table 5, from the coefficients by layer."""
    counts = coefficient_counts(layers) or {}
    return sum(counts[cell] for cell in DIAGONAL) / sum(counts[cell] for cell in CELLS)


def _on_diagonal(record: Record) -> list[float]:
    """Return, for each evaluation, the share of the KV heads on the diagonal of Table 5."""
    return _per_head(record, DIAGONAL)


def _negative(record: Record) -> list[float]:
    """Return, for each evaluation, the share of coefficients (four per head) that are negative."""
    return [count / 4 for count in _per_head(record, _NEGATIVE)]


def _per_head(record: Record, names: Iterable[str]) -> list[float]:
    """Return, for each evaluation, the sum of the named counts divided by the number of KV heads."""
    counts, heads = (
        [sum(each) for each in zip(*(accuracy_curve(record, name)[1] for name in counted), strict=True)]
        for counted in (names, CELLS)
    )
    return [count / number for count, number in zip(counts, heads, strict=True)]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claim, for each size, that more than half of the heads are on the diagonal of Table 5."""
    found = []
    for point in grid_points_of(records):
        runs = [run for run in by_arm(records)[arm_at(point, "kv-shift")].values() if not has_diverged(run)]
        shares = [_on_diagonal(run)[-1] for run in runs]
        found.append(
            Claim(
                statement=f"{grid_point_label(point)}: alpha1 > alpha2 exactly when beta1 > beta2 in more than half of "
                "the KV heads",
                paper=PAPER,
                ours=percent(shares) if shares else "all runs diverged",
                direction=higher(shares, [0.5] * len(shares)) if shares else "not shown",
                note="half is expected at the start, where they are independent",
            )
        )
        if records[0].options["model"].get("size") is None:
            steps = records[0].options["steps"]
            found[-1] = not_testable(found[-1], f"after {steps:,} steps the coefficients are near their start values")
    return found


def tables(records: Sequence[Record]) -> str:
    """Return Table 5 for each size with signs and sums by layer: counts are added over seeds, distances averaged."""
    shown, parts = without_tuning_runs(records), []
    for point in grid_points_of(shown):
        runs = [run for run in by_arm(shown)[arm_at(point, "kv-shift")].values() if not has_diverged(run)]
        rows = [("layer", *CELLS, *_NEGATIVE, *_SUMS)]
        layers = len(runs[0].result["coefficients"]) if runs else 0
        for name, chosen in [*((str(at), slice(at, at + 1)) for at in range(layers)), ("all", slice(None))]:
            counts = [coefficient_counts(run.result["coefficients"][chosen]) or {} for run in runs]
            if not counts:
                continue
            line = [f"{sum(count[cell] for count in counts):g}" for cell in (*CELLS, *_NEGATIVE)]
            line += [f"{statistics.fmean(count[cell] for count in counts):.3f}" for cell in _SUMS]
            rows.append((name, *line))
        parts.append(f"{grid_point_label(point)}: KV heads of {len(runs)} seeds together\n\n{as_markdown(rows)}")
    paper = as_markdown([("", *CELLS), ("the paper's 2.9B", *map(str, CELLS.values()))])
    return "\n\n".join([*parts, paper])


def plot(records: Sequence[Record]) -> Figure:
    """Plot over training the share of heads on the diagonal, of negative coefficients, and how far sums are from 1.

    Seeds may have equal shares: their curves are drawn beside each other.
    """
    titles = ["alpha1 > alpha2 exactly when beta1 > beta2", "Negative coefficients"]
    titles += [f"Distance of ${sign}_1 + {sign}_2$ from 1" for sign in "αβ"]
    labels = ["share of KV heads", "share of coefficients", *["mean over KV heads"] * 2]
    figure, panels = new_figure(titles, ylabels=labels)
    apart = records[0].options["steps"] / 40
    shown: list[Callable[[Record], Sequence[float]]] = [_on_diagonal, _negative]
    shown += [lambda run, name=name: accuracy_curve(run, name)[1] for name in _SUMS]
    for axes, values in zip(panels, shown, strict=True):
        draw_curves(
            axes,
            {
                arm.label: {
                    seed: ([step + apart * at for step in accuracy_curve(run, "loss")[0]], values(run))
                    for at, (seed, run) in enumerate(seeds.items())
                    if not has_diverged(run)
                }
                for arm, seeds in by_arm(records).items()
            },
        )
    for axes in panels[:2]:
        axes.set_ylim(-0.02, 1.02)
    draw_chance(panels[0], 0.5, "half of the heads")
    legend_below(figure, "one line for each seed, drawn side by side")
    return figure


RECIPE = Recipe(
    entry=ENTRY,
    source="Table 5 and Appendix F",
    arms=arms,
    plot=plot,
    claims=claims,
    tables=tables,
    notes=NOTES[2:3],
)
