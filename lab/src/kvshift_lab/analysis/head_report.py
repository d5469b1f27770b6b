"""The report of `kvshift analyze`, drawn from heads.json, attention.safetensors and the metrics of a run."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshift_lab.analysis.curves import plot_learning, save_figure
from kvshift_lab.analysis.learning import steps_to
from kvshift_lab.analysis.maps import count_coefficients, counts_by_layer, map_attention, map_coefficients, map_scores
from kvshift_lab.analysis.pages import inline, render
from kvshift_lab.core.atomic import read_json
from kvshift_lab.run.folder import read_metrics
from kvshift_lab.variants.by_name import shift_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = {
    "previous_token": ("previous token", "previous"),
    "duplicate_token": ("duplicate token", "earlier"),
    "induction": ("induction", "earlier+1"),
}
"""Display name of each score, and its key in the `moved` scores of a head."""

_TARGETS = {"gamma": "q", "alpha": "k", "beta": "v"}
_LISTED = 5  # heads per score in the table


def best_heads(heads: Sequence[Mapping[str, Any]], score: str) -> list[Mapping[str, Any]]:
    """Sort heads, in the format of heads.json, by one of `SCORES`, highest first."""
    place = SCORES[score][1]
    return sorted(heads, key=lambda head: -head["moved"][place])


def write_head_report(out: Path, metrics: Path | None = None) -> Path:
    """Write the report of an analysis from the files in its folder, replacing an earlier report.

    Reads heads.json and attention.safetensors, and `metrics`, the metrics.jsonl of a run, for its learning curve.
    Writes head-scores, attention and, if there is something to draw, coefficients and learning, each as PNG and SVG,
    and analysis.html, which contains them all.

    Returns:
        The path of the page.
    """
    found = read_json(out / "heads.json")
    heads, layers = found["heads"], found["coefficients"]
    variant = shift_label([_TARGETS[name] for name in _TARGETS if layers and name in layers[0]])
    learning = plot_learning(metrics, variant) if metrics is not None else None
    coefficients = map_coefficients(layers)
    page = render(
        "heads.html.jinja",
        title=f"Heads of {found['name']}",
        model=_describe(found),
        behaviour=_behaviour(found["behaviour"]),
        rows=found["rows"],
        length=found["length"],
        learning=learning and _image(learning, out / "learning"),
        reached=_with_head(("steps to an accuracy of", "90 %", "99 %"), steps_reached(metrics) if metrics else []),
        best=_best(heads, found["uniform"]),
        shifted=bool(layers),
        scores=_image(map_scores(heads), out / "head-scores"),
        coefficients=coefficients and _image(coefficients, out / "coefficients"),
        counts=_counts(layers),
        by_layer=_by_layer(layers),
        shown=found["maps"]["caption"],
        attention=_image(_attention(found["maps"], out), out / "attention"),
        options=json.dumps(found["options"], indent=1),
    )
    path = out / "analysis.html"
    path.write_text(page, encoding="utf-8")
    return path


def steps_reached(metrics: Path) -> list[tuple[str, ...]]:
    """Return the name of each slice of a task, and the steps at which its accuracy reached 90 % and 99 %."""
    evaluations = read_metrics(metrics, "eval")
    rows = []
    for name in evaluations[-1].get("accuracy", {}) if evaluations else ():
        lines = [line for line in evaluations if line["accuracy"][name] is not None]
        if lines:
            steps, accuracy = [line["step"] for line in lines], [line["accuracy"][name] for line in lines]
            found = (steps_to(steps, accuracy, level) for level in (0.9, 0.99))
            rows.append((name, *("not reached" if step is None else f"{step:,.0f}" for step in found)))
    return rows


def _describe(found: Mapping[str, Any]) -> str:
    layers = Counter(head["layer"] for head in found["heads"])
    fewest, most = min(layers.values()), max(layers.values())
    heads = _count(most, "head") if fewest == most else f"{fewest} to {most} heads"
    text = f"{found['model']}: {_count(len(layers), 'layer')}, {heads} in each"
    shifted = found["coefficients"]
    if not shifted:
        return f"{text}; nothing is shifted."
    names = {"gamma": "queries", "alpha": "keys", "beta": "values"}
    targets = " and ".join(names[name] for name in names if name in shifted[0])
    window = len(next(iter(shifted[0].values()))[0])
    return f"{text}; {targets} mixed with those of {_count(window - 1, 'token')} before."


def _with_head(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return a table for the page; an empty one without a heading if there are no rows."""
    return [head, *rows] if rows else []


def _behaviour(halves: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    rows = [
        (f"{name} half", f"{halves[name]['loss']:.3f}", f"{100 * halves[name]['accuracy']:.1f} %")
        for name in ("first", "second")
    ]
    return _with_head(("", "loss (nats per token)", "accuracy"), rows)


def _best(heads: Sequence[Mapping[str, Any]], uniform: Mapping[str, float]) -> list[tuple[str, ...]]:
    rows = []
    for score, (name, place) in SCORES.items():
        best = [
            f"L{head['layer']}H{head['head']} {head['moved'][place]:.2f}" for head in best_heads(heads, score)[:_LISTED]
        ]
        rows.append((name, *best, f"{uniform['previous' if place == 'previous' else 'earlier']:.3f}"))
    ranks = (f"{rank}." for rank in range(1, len(rows[0]) - 1))
    return _with_head(("score", *ranks, "uniform attention"), rows)


def _counts(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    counts = count_coefficients(layers) or {}
    rows = [(_signs(name), *map(str, row.values())) for name, row in counts.items()]
    return _with_head(("KV heads", "β₁ > β₂", "β₁ ≤ β₂"), rows)


def _by_layer(layers: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, ...]]]:
    """Return two tables, one of counts and one of means: the headings of a single table would need three lines."""
    counts = counts_by_layer(layers) or {}
    rows = [
        (layer, *(str(number) if isinstance(number, int) else f"{number:.3f}" for number in row.values()))
        for layer, row in counts.items()
    ]
    whole = _with_head(("layer", *map(_signs, counts.get("all", ()))), rows)
    return [[(row[0], *row[columns]) for row in whole] for columns in (slice(1, 5), slice(5, None))]


def _signs(name: str) -> str:
    """Write a name of `coefficient_counts` in symbols, to keep columns narrow: "negative alpha1" becomes "α₁ < 0"."""
    for word, sign in (("alpha1", "α₁"), ("alpha2", "α₂"), ("beta1", "β₁"), ("beta2", "β₂"), ("<=", "≤")):
        name = name.replace(word, sign)
    return re.sub("distance of (.*) from 1", r"|\1 − 1|", re.sub("negative (.*)", r"\1 < 0", name))


def _attention(maps: Mapping[str, Any], out: Path) -> Figure:
    from safetensors.numpy import load_file

    stored = load_file(out / "attention.safetensors")
    shown = maps["heads"]
    return map_attention(
        [stored[f"{head['layer']}.{head['head']}"] for head in shown],
        [head["title"] for head in shown],
        tokens=maps["tokens"],
        repeat=maps["repeat"],
    )


def _image(figure: Figure, stem: Path) -> str:
    with warnings.catch_warnings():
        # Characters that are missing from the font are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        return inline(save_figure(figure, stem)[1])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
