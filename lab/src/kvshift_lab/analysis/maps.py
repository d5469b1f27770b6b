"""Maps of a model: coefficients and scores by layer and head, and attention of single heads."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvshift_lab.analysis.colors import VERMILLION

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.figure import Figure
    from numpy import ndarray

_SYMBOLS = {"alpha": "α", "beta": "β", "gamma": "γ"}
_TARGETS = {"alpha": "keys", "beta": "values", "gamma": "queries"}
_CELLS = 64  # maximum number of cells for which a panel shows their values; more would not be legible
_LABELLED = 48  # maximum number of tokens that are written on the axes


def map_coefficients(layers: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw a panel for each coefficient, with layers as rows and heads as columns.

    Args:
        layers: {"alpha": (heads, W), "beta": (heads, W), "gamma": (query heads, W)} of each layer, as lists, for the
            shifted targets.

    Returns:
        The figure, or None if nothing is shifted.
    """
    from matplotlib.figure import Figure

    panels = [
        (
            f"${_SYMBOLS[name]}_{lag + 1}$: {_TARGETS[name]}, {_lag(lag)}",
            [[head[lag] for head in layer[name]] for layer in layers],
        )
        for name in (layers[0] if layers else ())
        for lag in range(len(layers[0][name][0]))
    ]
    if not panels:
        return None
    heads = max(len(row) for _, values in panels for row in values)
    figure = Figure(
        figsize=(len(panels) * max(2.4, 0.5 * heads + 1), max(2.2, 0.5 * len(layers) + 1.4)), layout="constrained"
    )
    # All panels share a scale that is centered at 0, so that red and blue cells have opposite signs.
    limit = max(1.0, *(abs(value) for _, values in panels for row in values for value in row))
    _draw_rows(figure, [panels], low=-limit, high=limit, colors="RdBu_r", cells=len(layers) * heads)
    return figure


def count_coefficients(layers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]] | None:
    """Count the KV heads that weight the current token more than the previous one, for keys and for values.

    Returns:
        {"alpha1 > alpha2": {"beta1 > beta2": n, "beta1 <= beta2": n}, "alpha1 <= alpha2": {...}}; None unless keys and
        values are both shifted with a window of 2.

    Source:
        Table 5, which counts 50, 17, 9 and 52 of 128 for the 2.9B model.
    """
    pairs = [
        (key, value)
        for layer in layers
        for key, value in zip(layer.get("alpha", ()), layer.get("beta", ()), strict=False)
    ]
    if not pairs or any(len(lags) != 2 for pair in pairs for lags in pair):
        return None
    counts = {f"alpha1 {a} alpha2": {f"beta1 {b} beta2": 0 for b in (">", "<=")} for a in (">", "<=")}
    for key, value in pairs:
        counts[f"alpha1 {_sign(key)} alpha2"][f"beta1 {_sign(value)} beta2"] += 1
    return counts


def coefficient_counts(layers: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Compute the statistics of Appendix F for the coefficients of all KV heads, by name.

    Args:
        layers: {"alpha": (heads, 2), "beta": (heads, 2)} of each layer, as lists.

    Returns:
        The four counts of `count_coefficients`, as "alpha1 > alpha2, beta1 <= beta2" ...; "negative alpha1" ..., the
        number of heads in which this coefficient is below 0; "distance of alpha1 + alpha2 from 1" and the same for
        beta, a mean over heads, which is 0 at initialisation. None if `count_coefficients` returns None.

    Source:
        Table 5 and Appendix F.
    """
    counts = count_coefficients(layers)
    if counts is None:
        return None
    found: dict[str, float] = {f"{key}, {value}": count for key, row in counts.items() for value, count in row.items()}
    for name in ("alpha", "beta"):
        pairs = [pair for layer in layers for pair in layer[name]]
        for lag in (0, 1):
            found[f"negative {name}{lag + 1}"] = sum(pair[lag] < 0 for pair in pairs)
        away = [abs(first + second - 1) for first, second in pairs]
        found[f"distance of {name}1 + {name}2 from 1"] = sum(away) / len(away)
    return found


def counts_by_layer(layers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]] | None:
    """Return `coefficient_counts` of each layer by its index as a string, and of "all" layers; None if it is None."""
    whole = coefficient_counts(layers)
    if whole is None:
        return None
    return {str(at): coefficient_counts([layer]) or {} for at, layer in enumerate(layers)} | {"all": whole}


def map_scores(heads: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw head scores between 0 and 1, with layers as rows and heads as columns.

    One row of panels shows where heads attend. If anything is shifted, a second row shows what they match and a third
    what they move; the last panel of the third row shows induction heads that need no other layer.

    Args:
        heads: Heads in the format of heads.json. `head_scores.HeadScores` explains each number.
    """
    from matplotlib.figure import Figure

    shown = {"previous": "$t-1$", "earlier": "$e$", "earlier+1": "$e+1$", "earlier+2": "$e+2$"}
    kinds = {"attention": "attends to", "matched": "matches", "moved": "moves"}
    if all(head["attention"] == head["matched"] == head["moved"] for head in heads):
        kinds = {"attention": "attends to and moves"}
    rows = [
        [(f"{verb} {name}", _grid(heads, lambda head, k=kind, p=place: head[k][p])) for place, name in shown.items()]
        for kind, verb in kinds.items()
    ]
    if len(rows) > 1:
        rows[-1][-1] = ("matches $e$ and moves $e+1$", _grid(heads, lambda head: head["alone"]))
    layers, across = len(rows[0][0][1]), max(map(len, rows[0][0][1]))
    figure = Figure(
        figsize=(len(shown) * max(2.6, 0.5 * across + 1), len(rows) * max(1.9, 0.5 * layers + 1)), layout="constrained"
    )
    _draw_rows(figure, rows, low=0, high=1, colors="Blues", cells=layers * across)
    return figure


def map_attention(
    maps: Sequence[ndarray], titles: Sequence[str], *, tokens: Sequence[str] | None = None, repeat: int | None = None
) -> Figure:
    """Draw the attention of single heads, one panel per head, with queries as rows and keys as columns.

    Args:
        maps: Attention probabilities, (T, T) each.
        titles: Titles of the panels.
        tokens: Tokens of the sequence, written on the axes if there are at most 48.
        repeat: Position at which the sequence repeats, marked by lines. None: no lines.
    """
    from matplotlib.figure import Figure

    columns = min(len(maps), 3)
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(4.6 * columns, 4.6 * rows), layout="constrained")
    image = None
    for number, (values, title) in enumerate(zip(maps, titles, strict=True), start=1):
        axes = figure.add_subplot(rows, columns, number)
        image = axes.imshow(values, cmap="Blues", vmin=0, vmax=1)
        axes.set_title(textwrap.fill(title, 40), fontsize="medium")
        axes.set(xlabel="position attended to", ylabel="position")
        if repeat is not None:
            axes.axhline(repeat - 0.5, color=VERMILLION, linewidth=0.8)
            axes.axvline(repeat - 0.5, color=VERMILLION, linewidth=0.8)
        if tokens is not None and len(tokens) <= _LABELLED:
            # Escape "$", which starts mathtext, and replace newlines by a visible character.
            shown = [token.replace("$", r"\$").replace("\n", "⏎") for token in tokens]
            axes.set_xticks(range(len(tokens)), shown, rotation=90, fontsize=6)
            axes.set_yticks(range(len(tokens)), shown, fontsize=6)
    if image is not None:
        figure.colorbar(image, ax=figure.axes, shrink=0.8)
    return figure


def _draw_rows(
    figure: Figure,
    rows: Sequence[Sequence[tuple[str, Sequence[Sequence[float]]]]],
    *,
    low: float,
    high: float,
    colors: str,
    cells: int,
) -> None:
    """Draw rows of panels, given as titles and values by layer and head, with a common scale.

    Layers with fewer heads than others have no color where heads are missing.
    """
    image: Any = None
    for row, panels in enumerate(rows):
        for column, (title, values) in enumerate(panels):
            axes = figure.add_subplot(len(rows), len(panels), row * len(panels) + column + 1)
            heads = max(map(len, values))
            filled = [[*line, *[math.nan] * (heads - len(line))] for line in values]
            image = axes.imshow(filled, cmap=colors, vmin=low, vmax=high, aspect="auto")
            axes.set_title(title, fontsize="medium")
            axes.set(xlabel="head", xticks=range(heads), yticks=range(len(values)))
            for layer, line in enumerate(values if cells <= _CELLS else ()):
                for head, value in enumerate(line):
                    text, ink = f"{round(value, 2) + 0.0:.2f}", _ink(value, high)
                    axes.text(head, layer, text, ha="center", va="center", fontsize=7, color=ink)
            if column == 0:
                axes.set_ylabel("layer")
    figure.colorbar(image, ax=figure.axes)


def _ink(value: float, high: float) -> str:
    """Return a legible text color: both color maps are dark where absolute values are large."""
    return "white" if abs(value) > 0.6 * high else "black"


def _grid(heads: Sequence[Mapping[str, Any]], read: Any) -> list[list[float]]:
    rows: dict[int, list[float]] = {}
    for head in heads:
        rows.setdefault(head["layer"], []).append(read(head))
    return [rows[layer] for layer in sorted(rows)]


def _sign(lags: Sequence[float]) -> str:
    return ">" if lags[0] > lags[1] else "<="


def _lag(lag: int) -> str:
    return ("current token", "token before")[lag] if lag < 2 else f"{lag} tokens before"
