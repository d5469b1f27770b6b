"""Tables and plots of rows; reads nothing but rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvshift.benchmarks.cases import Row
from kvshift.benchmarks.sweep import lines

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "markdown", "short"]

_OURS = ("kv_shift", "kv shift")
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito
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


# Heading and cell; a column without any cell is left out.
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
    """All rows, a table for each part, and how linear the sweep is; on which machine, by which commit."""
    if not rows:
        return ""
    pages = [_where(rows[0])]
    for part, title in _TITLES.items():
        chosen = [row for row in rows if row["part"] == part]
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


def _table(rows: Sequence[Row]) -> str:
    columns = [(head, cell) for head, cell in _COLUMNS if any(cell(row) for row in rows)]
    heads = ["case", "contestant", *(head for head, _ in columns)]
    body = []
    before = None
    for row in rows:
        first = row["case"] if row["case"] != before else ""
        before = row["case"]
        body.append([first, row["contestant"], *(cell(row) for _, cell in columns)])
    return _markdown_table(heads, body)


def _fits(rows: Sequence[Row]) -> str:
    body = [
        [
            contestant,
            dtype,
            axis,
            f"{1e6 * line.overhead:.3g}",
            f"{1e-9 / line.slope:.4g}" if line.slope else "",
            f"{100 * line.worst:.1f}",
        ]
        for (contestant, dtype, axis), (line, _) in lines(rows).items()
    ]
    heads = ["contestant", "dtype", "along", "fixed, µs", "GB/s beyond it", "worst deviation from the line, %"]
    return _markdown_table(heads, body) if body else ""


def _markdown_table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rule = ["---" if column < 2 else "---:" for column in range(len(heads))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, rule, *body])


def short(rows: Sequence[Row]) -> str:
    """What matters, for a screen: our rows, and those that failed."""
    table: list[tuple[str, ...]] = [("part", "case", "contestant", "ms", "x first", "of copy", "MiB saved", "MiB peak")]
    for row in rows:
        problem = row.get("problem")
        if row["part"] == "sweep" and not problem:
            continue
        if problem or row["contestant"].startswith(_OURS):
            cells = (
                _as("milliseconds", ".4g")(row),
                _as("ratio", ".3f")(row),
                _as("of_copy", ".0%")(row),
                _as("saved_bytes", ".1f", 2**-20)(row),
                _as("peak_bytes", ".1f", 2**-20)(row),
            )
            table.append((row["part"], row["case"], row["contestant"], *((problem,) if problem else cells)))
    widths = [max(len(line[column]) for line in table if len(line) == len(table[0])) for column in range(len(table[0]))]
    text = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=False)).rstrip() for line in table]
    for (contestant, dtype, axis), (line, _) in lines(rows).items():
        if contestant.startswith(_OURS):
            text.append(f"sweep  {dtype} along {axis}: {100 * line.worst:.0f} % off a line at the worst")
    return "\n".join(text)


def draw(rows: Sequence[Row]) -> Figure | None:
    """Share of a copy's bandwidth, cost in layers and models, cost against bytes: what of it there is."""
    from matplotlib.figure import Figure

    operator = [row for row in rows if row["part"] == "op" and "of_copy" in row and not row["rotary"]]
    whole = [row for row in rows if row["part"] in ("layer", "train", "prefill", "decode") and "ratio" in row]
    whole = [row for row in whole if row["contestant"].startswith(_OURS)]
    found = lines(rows)
    panels: list[Callable[[Axes], None]] = []
    if operator:
        panels.append(lambda axes: _draw_operator(axes, operator))
    if whole:
        panels.append(lambda axes: _draw_whole(axes, whole))
    if found:
        panels.append(lambda axes: _draw_sweep(axes, found))
    if not panels:
        return None
    figure = Figure(figsize=(6.5 * len(panels), 4.6), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        panel(figure.add_subplot(1, len(panels), number))
    return figure


def _draw_operator(axes: Axes, rows: Sequence[Row]) -> None:
    """A dot for each case, contestants below each other."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))[::-1]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for number, case in enumerate(cases):
        chosen = [row for row in rows if row["case"] == case]
        axes.plot(
            [100 * row["of_copy"] for row in chosen],
            [names.index(row["contestant"]) for row in chosen],
            "o" if "backward" in case else "^",
            color=_COLORS[number % len(_COLORS)],
            markersize=5,
            alpha=0.8,
            label=case,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="bytes that must move, as % of the copy's bandwidth", title="Operator", xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)


def _draw_whole(axes: Axes, rows: Sequence[Row]) -> None:
    places = range(len(rows))[::-1]
    middle = [100 * (row["ratio"] - 1) for row in rows]
    low = [100 * (row["ratio"] - row["ratio_low"]) for row in rows]
    high = [100 * (row["ratio_high"] - row["ratio"]) for row in rows]
    axes.errorbar(middle, list(places), xerr=[low, high], fmt="o", color=_COLORS[1], markersize=4, capsize=2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(list(places), [f"{row['part']}: {row['case']}" for row in rows], fontsize=6)
    axes.set(xlabel="% more time than the baseline (bars: quartiles)", title="Layers and models with KV shift")
    axes.grid(alpha=0.25)


def _draw_sweep(axes: Axes, found: dict[tuple[str, str, str], Any]) -> None:
    styles = {"B": "s", "T": "o", "G": "^", "D": "v"}
    colors: dict[tuple[str, str], str] = {}
    for (contestant, dtype, axis), (line, points) in found.items():
        color = colors.setdefault((contestant, dtype), _COLORS[len(colors) % len(_COLORS)])
        sizes = [size for size, _ in points]
        label = f"{contestant}, {dtype}" if axis == "T" else None
        axes.plot(sizes, [seconds for _, seconds in points], styles[axis], color=color, markersize=3.5, label=label)
        axes.plot(sizes, [line.seconds(size) for size in sizes], "-", color=color, linewidth=0.7)
    axes.set(xscale="log", yscale="log", xlabel="bytes that must move", ylabel="seconds", title="Sweep over T, B, G, D")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=7)
