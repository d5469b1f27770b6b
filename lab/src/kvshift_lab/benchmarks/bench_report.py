"""Tables and plots of benchmark rows, made from the rows alone.

    python -m kvshift_lab.benchmarks.bench_report FOLDER ...

recreates the table and the plot in each folder from its rows.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvshift_lab.analysis.colors import GREEN, GREY, ORANGE, PURPLE, colors_of
from kvshift_lab.analysis.curves import save_figure
from kvshift_lab.analysis.panels import new_figure
from kvshift_lab.analysis.tables import as_markdown, as_text
from kvshift_lab.benchmarks.cases import Row
from kvshift_lab.benchmarks.linearity import lines
from kvshift_lab.benchmarks.rows import read_rows
from kvshift_lab.core.atomic import write_bytes

if TYPE_CHECKING:  # importing matplotlib takes a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS = ("kv_shift", "kv shift")
_SHIFTED = colors_of(["KV-shift"])["KV-shift"]
SMOKE = "The preset smoke only shows that everything runs: times at its sizes say nothing about other sizes"
_RATIOS = (
    "A time is the median over rounds, and a multiple is the median of the ratios of single rounds, in which both ran "
    "next to each other: it need not be the ratio of the two times beside it."
)
_DTYPES: tuple[tuple[str, Literal["full", "none", "left"]], ...] = ((GREEN, "full"), (PURPLE, "none"), (ORANGE, "left"))
_TITLES = {
    "op": "Operator: milliseconds a call",
    "layer": "Attention layer: milliseconds a call",
    "train": "Training: milliseconds a step",
    "prefill": "Prefill: milliseconds a prompt",
    "decode": "Decoding: milliseconds a token",
    "memory": "Memory of one decoder layer",
    "sweep": "Cost against T, B, G, D and dtype",
}


def _milliseconds(row: Row) -> str:
    if "milliseconds" not in row:
        return ""
    return f"{row['milliseconds']:.4g} ({row['milliseconds_low']:.4g} to {row['milliseconds_high']:.4g})"


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})" if "ratio" in row else ""


def _as(name: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: format(row[name] * scale, form) if row.get(name) is not None else ""


# Heading and cell text of each column; columns without any text are omitted.
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("ms (quartiles)", _milliseconds),
    ("multiple of the first (quartiles)", _ratio),
    ("host, ms a call", _as("host_milliseconds", ".3g")),
    ("GB/s", _as("gb_per_second", ".4g")),
    ("of the copy's GB/s", _as("of_copy", ".1%")),
    ("peak, MiB", _as("peak_bytes", ".2f", 2**-20)),
    ("more than the first's", _as("peak_more", "+.2%")),
    ("saved for backward, MiB", _as("saved_bytes", ".2f", 2**-20)),
    ("more than the first's", _as("saved_more", "+.2%")),
    ("worst error", _as("worst_error", ".1e")),
    ("", lambda row: row.get("problem") or row.get("computes", "")),
)


def markdown(rows: Sequence[Row]) -> str:
    """Return all rows in Markdown: machine and commit, a table for each part, and the linear fits of the sweep."""
    if not rows:
        return ""
    pages = [_where(rows[0])]
    if rows[0]["options"]["preset"] == "smoke":
        pages.append(f"{SMOKE}.")
    if any("ratio" in row for row in rows):
        pages.append(_RATIOS)
    if missing := _left_out(rows):
        pages.append(missing)
    for part, title in _TITLES.items():
        chosen = [row for row in rows if row["part"] == part and "left_out" not in row]
        if chosen:
            pages += [f"## {title}", _table(chosen)]
        if part == "sweep" and (fits := _fits(rows)):
            pages.append(fits)
    return "\n\n".join(pages) + "\n"


def _where(row: Row) -> str:
    hardware, versions = row["hardware"], row["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    device = hardware["device"]
    where = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads"
    options = ", ".join(f"{name} {value}" for name, value in row["options"].items())
    return (
        f"Measured on {where if device == 'cpu' else f'{device} ({where})'}, {row['started']}, commit {row['commit']}; "
        f"{named}; CPU kernel: {hardware['cpu_kernel']}. Options: {options}."
    )


def _left_out(rows: Sequence[Row]) -> str:
    """Return text that lists the skipped implementations by reason."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if "left_out" in row and row["contestant"] not in (those := names.setdefault(row["left_out"], [])):
            those.append(row["contestant"])
    found = "; ".join(f"{' | '.join(those)} ({reason})" for reason, those in names.items())
    return f"Left out: {found}." if found else ""


def _table(rows: Sequence[Row]) -> str:
    columns = [(head, cell) for head, cell in _COLUMNS if any(cell(row) for row in rows)]
    heads = ["case", "implementation", *(head for head, _ in columns)]
    body = []
    before = None
    for row in rows:
        first = row["case"] if row["case"] != before else ""
        before = row["case"]
        body.append([first, row["contestant"], *(cell(row) for _, cell in columns)])
    return as_markdown([heads, *body], left=2)


def _fits(rows: Sequence[Row]) -> str:
    body = [
        [
            implementation,
            dtype,
            axis,
            f"{1e6 * line.overhead:.3g}",
            f"{1e-9 / line.slope:.4g}" if line.slope else "",
            f"{100 * line.worst:.1f}",
        ]
        for (implementation, dtype, axis), (line, _) in lines(rows).items()
    ]
    heads = ["implementation", "dtype", "along", "fixed, µs", "GB/s beyond it", "worst deviation from the line, %"]
    return as_markdown([heads, *body], left=2) if body else ""


def short(rows: Sequence[Row]) -> str:
    """Return a summary for the terminal: the rows of `kv_shift`, and all rows that failed."""
    table: list[tuple[str, ...]] = [
        ("part", "case", "implementation", "ms", "x first", "of copy", "MiB saved", "MiB peak")
    ]
    for row in rows:
        problem = row.get("problem")
        if row["part"] == "sweep" and not problem:
            continue
        if problem or (row["contestant"].startswith(_OURS) and "left_out" not in row):
            cells = (
                _as("milliseconds", ".4g")(row),
                _as("ratio", ".3f")(row),
                _as("of_copy", ".0%")(row),
                _as("saved_bytes", ".1f", 2**-20)(row),
                _as("peak_bytes", ".1f", 2**-20)(row),
            )
            table.append((row["part"], row["case"], row["contestant"], *((problem,) if problem else cells)))
    text = [as_text(table, left=3)]
    for (implementation, dtype, axis), (line, _) in lines(rows).items():
        if implementation.startswith(_OURS):
            text.append(f"sweep  {dtype} along {axis}: at most {100 * line.worst:.0f} % off a straight line")
    if missing := _left_out(rows):
        text.append(missing)
    return "\n".join(text)


def write(out: Path, rows: Sequence[Row], kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write OUT/table.md and, if there is something to plot, OUT/plot in these file formats; return the paths."""
    written = [out / "table.md"]
    write_bytes(written[0], markdown(rows).encode())
    figure = draw(rows)
    return written if figure is None else written + save_figure(figure, out / "plot", kinds)


def draw(rows: Sequence[Row]) -> Figure | None:
    """Plot the share of a copy's bandwidth, cost in layers and models, and cost by bytes; None if nothing to plot."""
    operator = [row for row in rows if row["part"] == "op" and "of_copy" in row and not row["rotary"]]
    whole = [row for row in rows if row["part"] in ("layer", "train", "prefill", "decode") and "ratio" in row]
    whole = [row for row in whole if row["contestant"].startswith(_OURS)]
    found = lines(rows)
    drawn: dict[str, Callable[[Axes], None]] = {}
    for each in dict.fromkeys(row["pass"] for row in operator):
        rows_of = [row for row in operator if row["pass"] == each]
        drawn[f"Operator, {each}"] = lambda axes, rows_of=rows_of: _draw_operator(axes, rows_of)
    if whole:
        drawn["Layers and models with KV shift"] = lambda axes: _draw_whole(axes, whole)
    if found:
        drawn["Sweep over T, B, G, D"] = lambda axes: _draw_sweep(axes, found)
    if not drawn:
        return None
    figure, panels = new_figure([*drawn], columns=1, height=3.9)
    for axes, draw_panel in zip(panels, drawn.values(), strict=True):
        draw_panel(axes)
    return figure


def _draw_operator(axes: Axes, rows: Sequence[Row]) -> None:
    """Plot one row of markers per implementation; colors and fills distinguish dtypes, markers distinguish shapes."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))[::-1]
    dtypes = dict(zip(dict.fromkeys(row["dtype"] for row in rows), _DTYPES, strict=False))
    shapes = dict(zip(dict.fromkeys(tuple(row["shape"]) for row in rows), "o^sDv", strict=False))
    for row in rows:
        (color, fill), marker = dtypes[row["dtype"]], shapes[tuple(row["shape"])]
        at = 100 * row["of_copy"], names.index(row["contestant"])
        label = f"{tuple(row['shape'])} {row['dtype']}"
        axes.plot(*at, marker, color=color, fillstyle=fill, markersize=6, alpha=0.8, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("% of the copy's bandwidth")
    axes.set_xlim(0, None)
    _legend_beside(axes)


def _draw_whole(axes: Axes, rows: Sequence[Row]) -> None:
    positions = list(range(len(rows)))[::-1]
    middle = [100 * (row["ratio"] - 1) for row in rows]
    low = [100 * (row["ratio"] - row["ratio_low"]) for row in rows]
    high = [100 * (row["ratio_high"] - row["ratio"]) for row in rows]
    axes.errorbar(middle, positions, xerr=[low, high], fmt="o", color=_SHIFTED, markersize=4, capsize=2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(positions, [textwrap.fill(f"{row['part']}: {row['case']}", 32) for row in rows])
    axes.set_xlabel("% more time than without (bars: quartiles)")


def _draw_sweep(axes: Axes, found: dict[tuple[str, str, str], Any]) -> None:
    """Plot seconds by bytes; colors distinguish implementations, line styles dtypes, and markers the changed axis."""
    markers = {"B": "s", "T": "o", "G": "^", "D": "v"}
    colors = {name: _SHIFTED if name.startswith(_OURS) else GREY for name, _, _ in found}
    styles = dict(zip(dict.fromkeys(dtype for _, dtype, _ in found), ("-", "--", ":"), strict=False))
    for (name, dtype, axis), (line, points) in found.items():
        sizes, seconds = zip(*points, strict=True)
        axes.plot(sizes, seconds, markers[axis], color=colors[name], markersize=3.5)
        fitted = [line.seconds(size) for size in sizes]
        axes.plot(sizes, fitted, styles[dtype], color=colors[name], linewidth=0.8, label=f"{name}, {dtype}")
    for axis in dict.fromkeys(axis for _, _, axis in found):
        axes.plot([], [], markers[axis], color="black", markersize=3.5, label=f"{axis} changed")
    axes.set(xscale="log", yscale="log", xlabel="bytes that must move", ylabel="seconds")
    _legend_beside(axes)


def _legend_beside(axes: Axes) -> None:
    """Draw the legend to the right of the panel, with each label once."""
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)}
    axes.legend(list(entries.values()), list(entries), frameon=False, handletextpad=0.2, **place)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name), read_rows(Path(name) / "rows.jsonl"), kinds=["svg"])
