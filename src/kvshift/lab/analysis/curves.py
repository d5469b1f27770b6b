"""Loss curves and learned coefficients, drawn from run folders and nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshift.lab.analysis.colors import colors_of
from kvshift.lab.analysis.maps import map_coefficients
from kvshift.lab.analysis.panels import count_steps, legend_below, whole_ticks
from kvshift.lab.analysis.runs import Run, read_run
from kvshift.lab.analysis.statistics import t_interval
from kvshift.lab.errors import LabError
from kvshift.lab.runs.folder import read_metrics

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_coefficients", "plot_curves", "plot_learning", "save_figure"]


def plot_curves(folders: Sequence[Path], *, baseline: str = "vanilla") -> Figure:
    """Loss over tokens of finished runs; where a baseline and the others have the same seeds, their differences too.

    Pale lines are training losses, dots the evaluations; each seed has its own line.
    """
    from matplotlib.figure import Figure

    runs = [read_run(folder) for folder in folders]
    if not runs:
        raise LabError("folders must name at least one finished run, got none")
    by_name: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, {})[run.config["seed"]] = run
    others = {name: seeds for name, seeds in by_name.items() if name != baseline}
    paired = baseline in by_name and others and all(s.keys() == by_name[baseline].keys() for s in others.values())

    figure = Figure(figsize=(10, 4.2) if paired else (6, 4.2), layout="constrained")
    losses = figure.add_subplot(1, 2 if paired else 1, 1)
    _draw_losses(losses, by_name)
    if paired:
        differences = figure.add_subplot(1, 2, 2, sharex=losses)
        for name, seeds in others.items():
            of = f"{name}: " if len(others) > 1 else ""
            _draw_differences(differences, by_name[baseline], seeds, colors_of(by_name)[name], of=of)
        difference = f"{next(iter(others))} minus {baseline}" if len(others) == 1 else f"minus {baseline}'s"
        differences.axhline(0, color="black", linewidth=0.8)
        differences.set(ylabel="difference (nats per token)", title=f"Validation loss, {difference}")
        _count_tokens(differences)
        differences.grid(alpha=0.25)
    legend_below(figure)
    return figure


def _draw_losses(axes: Axes, by_name: Mapping[str, Mapping[int, Run]]) -> None:
    lowest, highest = [], []
    colors = colors_of(by_name)
    for name, seeds in by_name.items():
        color = colors[name]
        for number, run in enumerate(seeds.values()):
            axes.plot(*run.series("train", "tokens", "loss"), color=color, alpha=0.25, linewidth=0.8)
            tokens, loss = run.series("eval", "tokens", "loss")
            axes.plot(tokens, loss, "o-", color=color, markersize=2.5, linewidth=1.2, label="" if number else name)
            lowest.append(min(loss))
            highest.append(max(loss))
    # Every evaluation is in sight; of the training loss that comes before the first of them, what fits.
    space = max(0.05 * (max(highest) - min(lowest)), 0.02)
    axes.set_ylim(min(lowest) - space, max(highest) + space)
    axes.set(ylabel="loss (nats per token)", title="Validation loss (pale: training loss)")
    _count_tokens(axes)
    axes.grid(alpha=0.25)


def _count_tokens(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("tokens")
    whole_ticks(axes.xaxis)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1.2M


def _draw_differences(
    axes: Axes, baseline: Mapping[int, Run], other: Mapping[int, Run], color: str, *, of: str
) -> None:
    columns: dict[float, list[float]] = {}
    for seed, run in other.items():
        theirs = dict(zip(*baseline[seed].series("eval", "tokens", "loss"), strict=True))
        ours = zip(*run.series("eval", "tokens", "loss"), strict=True)
        points = [(tokens, loss - theirs[tokens]) for tokens, loss in ours if tokens in theirs]
        axes.plot(*zip(*points, strict=True), color=color, alpha=0.4 if len(other) > 1 else 1, linewidth=1)
        for tokens, difference in points:
            columns.setdefault(tokens, []).append(difference)
    whole = {tokens: values for tokens, values in columns.items() if len(values) == len(other) > 1}
    if whole:
        low, high = zip(*(t_interval(values) for values in whole.values()), strict=True)
        mean = [statistics.fmean(values) for values in whole.values()]
        axes.plot(list(whole), mean, color=color, linewidth=2, label=f"{of}mean difference over seeds")
        axes.fill_between(list(whole), low, high, color=color, alpha=0.15, linewidth=0, label=f"{of}its 95 % interval")


def plot_learning(metrics: Path, variant: str = "vanilla") -> Figure | None:
    """Loss over steps of one run, finished or not, and beside it the accuracy by slice where a task was learned.

    Args:
        metrics: the run's metrics.jsonl.
        variant: of the model, which decides the color of the loss.

    Returns:
        None before the first evaluation.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    training, evaluations = (read_metrics(metrics, kind) for kind in ("train", "eval"))
    if not evaluations:
        return None
    names = list(evaluations[-1].get("accuracy", {}))
    figure = Figure(figsize=(10, 4.2) if names else (6, 4.2), layout="constrained")
    color = colors_of([variant])[variant]
    axes = figure.add_subplot(1, 2 if names else 1, 1)
    axes.plot(*_over_steps(training, lambda line: line["loss"]), color=color, alpha=0.25, label="training loss")
    points = _over_steps(evaluations, lambda line: line["loss"])
    axes.plot(*points, "o-", color=color, markersize=2.5, label="validation loss")
    axes.set(ylabel="loss (nats per token)", title="Loss")
    count_steps(axes)
    axes.grid(alpha=0.25)
    if names:
        axes = figure.add_subplot(1, 2, 2)
        shades = colormaps["viridis"](np.linspace(0, 0.95, len(names)))  # slices are in order, such as numbers of hops
        for name, shade in zip(names, shades, strict=True):
            points = _over_steps(evaluations, lambda line, name=name: line["accuracy"][name])
            axes.plot(*points, "o-", color=shade, markersize=2.5, label=name)
        axes.set(ylabel="accuracy", title="Accuracy by slice", ylim=(-0.02, 1.02))
        count_steps(axes)
        axes.grid(alpha=0.25)
    legend_below(figure)
    return figure


def _over_steps(lines: Sequence[dict[str, Any]], read: Callable[[dict[str, Any]], float | None]) -> tuple[list, list]:
    """Steps and values; a slice without answers has none."""
    points = [(line["step"], read(line)) for line in lines if read(line) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot_coefficients(folder: Path) -> Figure | None:
    """The learned coefficients of a finished run: a panel for each, layers down, heads across. None for vanilla."""
    return map_coefficients(read_run(folder).coefficients())


def save_figure(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write STEM.png and STEM.svg, or one of them; the same figure gives the same bytes."""
    import matplotlib

    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    with matplotlib.rc_context({"svg.hashsalt": "kvshift"}):
        for kind, path in zip(kinds, paths, strict=True):
            figure.savefig(path, dpi=150, metadata={"Software" if kind == "png" else "Date": None})
            figure.set_layout_engine("none")  # it is fixed; computing it again takes as long as the drawing
    return paths
