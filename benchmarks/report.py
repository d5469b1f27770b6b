"""Make the tables and plots of results/bench, and the tables of docs/performance.md on serving, from recorded rows.

python benchmarks/report.py               all of them, in the working directory
python benchmarks/report.py FOLDER ...    table.md and plot.svg in each folder, from its rows.jsonl
python benchmarks/report.py --check       write nothing; fail if a table or the page is out of date
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from serving import BASELINE, CONTROL

from kvshift_lab.analysis.colors import GREEN, GREY, ORANGE, PURPLE, colors_of
from kvshift_lab.analysis.curves import save_figure
from kvshift_lab.analysis.generated_page import write_or_check
from kvshift_lab.analysis.panels import new_figure
from kvshift_lab.analysis.tables import as_markdown, as_text
from kvshift_lab.core.atomic import write_bytes
from kvshift_lab.core.json_lines import read_lines

if TYPE_CHECKING:  # importing matplotlib takes a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

BENCH = Path("results/bench")
MARKERS = ("<!-- From here on made from results/serving by `make results`. -->\n", "<!-- Until here. -->\n")
PAGE, RESULTS = Path("docs/performance.md"), Path("results/serving")

_OURS = ("kv_shift", "kv shift")
_BASELINES = {"without shift": "the same without shift", "kv shift, plain operations": "plain operations"}
_SHIFTED = colors_of(["KV-shift"])["KV-shift"]
SMOKE = "The preset smoke only shows that everything runs: times at its sizes say nothing about other sizes"
_RATIOS = (
    "A time is the median over rounds, and a multiple is the median of the ratios of single rounds, in which both ran "
    "next to each other: it need not be the ratio of the two times beside it."
)
_DTYPES: tuple[tuple[str, Literal["full", "none", "left"]], ...] = ((GREEN, "full"), (PURPLE, "none"), (ORANGE, "left"))
_TIMES = (
    "The engines took turns. The last columns are ratios of times: median over rounds, and quartiles. The control, a "
    "second engine of vLLM's Llama beside the first, shows what differs between two engines of one model."
)


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
    """Return a summary for the terminal: the rows of `kv_shift`, without the sweep, and all rows that failed."""
    table: list[tuple[str, ...]] = [("part", "case", "implementation", "ms", "x first", "of copy", "MiB saved")]
    for row in rows:
        problem = row.get("problem")
        cells = (
            _as("milliseconds", ".4g")(row),
            _as("ratio", ".3f")(row),
            _as("of_copy", ".0%")(row),
            _as("saved_bytes", ".1f", 2**-20)(row),
        )
        ours = row["contestant"].startswith(_OURS) and "left_out" not in row and row["part"] != "sweep"
        if problem or ours:
            table.append((row["part"], row["case"], row["contestant"], *((problem,) if problem else cells)))
    return as_text(table, left=3)


def write(folder: Path) -> None:
    """Write table.md and, if there is something to plot, plot.svg of a folder's rows."""
    rows = list(read_lines(folder / "rows.jsonl"))
    write_bytes(folder / "table.md", markdown(rows).encode())
    if (figure := draw(rows)) is not None:
        save_figure(figure, folder / "plot", ["svg"])


def draw(rows: Sequence[Row]) -> Figure | None:
    """Plot the share of a copy's bandwidth, cost in layers and models, and cost by bytes; None if nothing to plot."""
    operator = [row for row in rows if row["part"] == "op" and "of_copy" in row and not row["rotary"]]
    panels: dict[str, tuple[float, Callable[[Axes], None]]] = {}  # title: height in inches, function that draws it
    for each in dict.fromkeys(row["pass"] for row in operator):
        of_pass = [row for row in operator if row["pass"] == each]
        panels[f"Operator, {each}"] = 3.9, lambda axes, rows=of_pass: _draw_operator(axes, rows)
    for baseline, compared in compared_rows(rows).items():
        height = 1.0 + 0.4 * len(compared)
        title = f"KV shift beside {_BASELINES.get(baseline, baseline)}"
        panels[title] = height, lambda axes, rows=compared, name=baseline: _draw_compared(axes, rows, name)
    if found := lines(rows):
        panels["Sweep over T, B, G, D"] = 3.9, lambda axes: _draw_sweep(axes, found)
    if not panels:
        return None
    figure, made = new_figure([*panels], columns=1)
    heights = [height for height, _ in panels.values()]
    figure.set_figheight(sum(heights) + 0.5)
    made[0].get_gridspec().set_height_ratios(heights)  # type: ignore[union-attr]
    for axes, (_, draw_panel) in zip(made, panels.values(), strict=True):
        draw_panel(axes)
    return figure


def compared_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of layers and models with the shift, without those of baselines, by the name of their baseline.

    The baseline of a case is its first row.
    """
    first: dict[tuple[str, str], str] = {}
    found: dict[str, list[Row]] = {}
    for row in rows:
        baseline = first.setdefault((row["part"], row["case"]), row["contestant"])
        if (
            row["part"] in ("layer", "train", "prefill", "decode")
            and row["contestant"] == "kv shift"
            and "ratio" in row
        ):
            found.setdefault(baseline, []).append(row)
    return found


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


def _draw_compared(axes: Axes, rows: Sequence[Row], baseline: str) -> None:
    """Plot how much more time than the baseline the rows took, in percent."""
    positions = list(range(len(rows)))[::-1]
    middle = [100 * (row["ratio"] - 1) for row in rows]
    low = [100 * (row["ratio"] - row["ratio_low"]) for row in rows]
    high = [100 * (row["ratio_high"] - row["ratio"]) for row in rows]
    axes.errorbar(middle, positions, xerr=[low, high], fmt="o", color=_SHIFTED, markersize=4, capsize=2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(positions, [textwrap.fill(f"{row['part']}: {row['case']}", 32) for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(f"% more time than {_BASELINES.get(baseline, baseline)} (bars: quartiles)")


def _draw_sweep(axes: Axes, found: dict[tuple[str, str, str], Any]) -> None:
    """Plot seconds by bytes; colors distinguish implementations, line styles dtypes, and markers the changed axis."""
    markers = {"B": "s", "T": "o", "G": "^", "D": "v"}
    colors = {name: _SHIFTED if name.startswith(_OURS) else GREY for name, _, _ in found}
    styles = dict(zip(dict.fromkeys(dtype for _, dtype, _ in found), ("-", "--", ":"), strict=False))
    for (name, dtype, axis), (line, points) in found.items():
        sizes, seconds = zip(*points, strict=True)
        axes.plot(sizes, seconds, markers[axis], color=colors[name], markersize=3.5)
        fitted = [line.overhead + line.slope * size for size in sizes]
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


class Line(NamedTuple):
    """The line t = overhead + slope * bytes, in seconds and seconds per byte; `worst` is its largest relative error."""

    overhead: float
    slope: float
    worst: float


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit a line with nonnegative overhead and slope by least squares of the relative errors.

    With u = 1 / t it minimises the sum of (u (overhead + slope n - t))^2.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(f"a line needs two points of different size, got sizes {list(sizes)}")
    u, n = 1 / np.asarray(seconds), np.asarray(sizes)
    slope, overhead = map(float, np.polyfit(n, seconds, 1, w=u))
    if overhead < 0:
        overhead, slope = 0.0, float((u * n).sum() / (u * n @ (u * n)))
    elif slope < 0:
        overhead, slope = float(u.sum() / (u @ u)), 0.0
    worst = max(abs(t / (overhead + slope * n) - 1) for n, t in zip(sizes, seconds, strict=True))
    return Line(overhead, slope, worst)


def lines(rows: Sequence[Row]) -> dict[tuple[str, str, str], tuple[Line, list[tuple[float, float]]]]:
    """Return the line and its points (bytes, seconds) for each (implementation, dtype, axis) of a sweep's rows."""
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row["part"] == "sweep" and "milliseconds" in row:
            key = (row["contestant"], row["dtype"], row["axis"])
            points.setdefault(key, []).append((row["moved_bytes"], row["milliseconds"] / 1e3))
    found = {}
    for key, pairs in points.items():
        if len({size for size, _ in pairs}) > 1:
            found[key] = (fit_line(*zip(*pairs, strict=True)), sorted(pairs))
    return found


def serving_tables(capacity: Sequence[Row], speed: Sequence[Row]) -> str:
    """Return the text between the markers of docs/performance.md: a table for each file, and the origin of its rows."""
    parts = []
    if capacity:
        parts += [_capacity(capacity), "", f"`python benchmarks/serving.py capacity`; {_provenance(capacity)}", ""]
    if speed:
        shape = speed[0]["shape"]
        heads = f"{shape['num_attention_heads']} heads on {shape['num_key_value_heads']}"
        size = f"{shape['num_hidden_layers']} layers of width {shape['hidden_size']}, {heads}, {shape['dtype']}"
        parts += [
            _TIMES,
            "",
            _speed(speed),
            "",
            f"`python benchmarks/serving.py speed`, {size}; {_provenance(speed)}",
            "",
        ]
    return "\n".join(parts)


def _speed(rows: Sequence[Row]) -> str:
    heading = ("", "requests", "tokens: prompt, new", BASELINE, "with shift", "time with shift", "of the control")
    lines: list[tuple[str, ...]] = [heading]
    found = {(row["part"], row["model"]): row for row in rows}
    for row in rows:
        theirs, control = found[row["part"], BASELINE], found.get((row["part"], CONTROL))
        if row is theirs or row is control:
            continue
        tokens = row["requests"] * (row["prompt_tokens"] if row["new_tokens"] == 1 else row["new_tokens"])
        rates = (
            (
                f"{one['seconds']:.3f} s"
                if row["requests"] == row["new_tokens"] == 1
                else f"{tokens / one['seconds']:,.0f} tokens/s"
            )
            for one in (theirs, row)
        )
        shape = f"{row['prompt_tokens']}, {row['new_tokens']}"
        lines.append((row["part"], str(row["requests"]), shape, *rates, _quartiles(row), _quartiles(control)))
    return as_markdown(lines, left=1)


def _quartiles(row: Row | None) -> str:
    return "" if row is None else "{:.3f} ({:.3f} to {:.3f})".format(row["ratio"], *row["ratio_quartiles"])


def _capacity(rows: Sequence[Row]) -> str:
    lengths = sorted({row["tokens"] for row in rows})
    heading = ("block size", "bytes per token", "of them raw", "by hand", *(f"{length:,} tokens" for length in lengths))
    lines: list[tuple[str, ...]] = [("model", *heading)]
    for model, size in dict.fromkeys((row["model"], row["block_size"]) for row in rows):
        of_size = [row for row in rows if (row["model"], row["block_size"]) == (model, size)]
        here = {(row["tokens"], row["asynchronous"]): row for row in of_size}
        one = next(iter(here.values()))
        sizes = (f"{one[name]:,.0f}" for name in ("bytes_per_token", "state_bytes_per_token", "by_hand"))
        shares = (
            ", ".join(f"{100 * here[length, asynchronous]['share']:.2f} %" for asynchronous in (False, True))
            for length in lengths
        )
        lines.append((model, str(size), *sizes, *shares))
    return as_markdown(lines, left=1)


def _provenance(rows: Sequence[Row]) -> str:
    row = rows[-1]
    versions, hardware = row["versions"], row["hardware"]
    return (
        f"vLLM {versions['vllm']}, torch {versions['torch']}, {hardware['cpu']}, {hardware['cores']} cores, "
        f"commit {str(row['commit'])[:8]}, {row['started'][:10]}."
    )


def main(arguments: Sequence[str]) -> int:
    """Make or check what the arguments name, and return the exit code."""
    folders = [Path(name) for name in arguments if not name.startswith("-")]
    for folder in folders:
        write(folder)
    if folders:
        return 0

    def serving() -> str:
        return serving_tables(*(_recorded(RESULTS / f"{name}.jsonl") for name in ("capacity", "speed")))

    if code := write_or_check("python benchmarks/report.py", arguments, PAGE, RESULTS, MARKERS, serving):
        return code
    for folder in sorted(path.parent for path in BENCH.glob("*/rows.jsonl")):
        if not arguments:
            write(folder)
        elif (folder / "table.md").read_text() != markdown(_recorded(folder / "rows.jsonl")):
            print(f"{folder / 'table.md'} is out of date: run `make results` and commit the changes", file=sys.stderr)
            return 1
    return 0


def _recorded(path: Path) -> list[Row]:
    return list(read_lines(path)) if path.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
