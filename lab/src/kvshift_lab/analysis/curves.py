"""Plots of loss curves, probes and learned coefficients from run folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshift_lab.analysis.accuracy import curve_difference, draw_dotted, draw_means
from kvshift_lab.analysis.colors import colors_of
from kvshift_lab.analysis.maps import map_coefficients
from kvshift_lab.analysis.panels import INTERVALS, TWO_SEEDS, count_steps, integer_ticks, legend_below, new_figure
from kvshift_lab.core.errors import LabError
from kvshift_lab.run.finished import Run, read_run
from kvshift_lab.run.folder import read_metrics

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.figure import Figure

# Inverts the lightness and keeps the hues: dark lines on white become light lines on black.
_DARK = "@media (prefers-color-scheme: dark) {#figure_1 {filter: invert(0.93) hue-rotate(180deg)}}"

# Title, which fits on one line, and y-axis label of each probe, by its name in metrics.jsonl.
PROBE_PANELS = {
    "prefix_matching": ("Prefix matching, best head", "attention"),
    "previous_token": ("Previous token, best head", "attention"),
    "repeat_loss": ("Loss on repeated random tokens", "nats per token"),
    "loss_pair_seen": ("Loss, pair seen before", "nats per token"),
    "loss_token_seen": ("Loss, token seen, pair not", "nats per token"),
    "loss_neither": ("Loss, token not seen before", "nats per token"),
    "late_minus_early": ("Loss at 500 minus that at 50", "nats per token"),
}


def plot_curves(folders: Sequence[Path], *, baseline: str = "vanilla") -> Figure:
    """Draw loss over tokens of finished runs, and differences to the baseline if all variants have its seeds.

    Each line is a mean over seeds, and its band the 95 % interval of that mean; dotted lines are training losses.
    """
    by_name = _runs_by_name(folders)
    others = {name: seeds for name, seeds in by_name.items() if name != baseline}
    paired = baseline in by_name and others and all(s.keys() == by_name[baseline].keys() for s in others.values())

    differs = f"{next(iter(others))} minus {baseline}" if len(others) == 1 else f"minus {baseline}"
    titles = ["Validation loss (dotted: training loss)", f"Validation loss, {differs}"] if paired else ["Loss"]
    figure, (losses, *rest) = new_figure(titles, ylabels=["loss (nats per token)", "difference (nats per token)"])
    training, validation = (_series(by_name, kind, "loss") for kind in ("train", "eval"))
    draw_means(losses, validation)
    _, high = losses.get_ylim()  # show all evaluations; early training losses may be outside
    draw_dotted(losses, training)
    losses.set_ylim(top=high)
    for axes in rest:
        draw_means(axes, {name: curve_difference(validation[name], validation[baseline]) for name in others})
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xlim(losses.get_xlim())
    _finish(figure, by_name)
    return figure


def plot_probes(folders: Sequence[Path]) -> Figure | None:
    """Draw a panel for each quantity that `--probes` measured in all finished runs; None if there is none.

    Each line is a mean over seeds, and its band the 95 % interval of that mean.
    """
    by_name = _runs_by_name(folders)
    lines = [[line for line in run.metrics if line["kind"] == "probes"] for s in by_name.values() for run in s.values()]
    names = [name for name in PROBE_PANELS if all(of_run and all(name in line for line in of_run) for of_run in lines)]
    if not names:
        return None
    titles, labels = zip(*(PROBE_PANELS[name] for name in names), strict=True)
    figure, panels = new_figure(titles, ylabels=labels, height=2.6)
    for axes, name in zip(panels, names, strict=True):
        draw_means(axes, _series(by_name, "probes", name))
    _finish(figure, by_name)
    return figure


def _runs_by_name(folders: Sequence[Path]) -> dict[str, dict[int, Run]]:
    """Return finished runs by their label and seed."""
    found: dict[str, dict[int, Run]] = {}
    for run in map(read_run, folders):
        seeds, seed = found.setdefault(run.name, {}), run.config["seed"]
        if seed in seeds:
            raise LabError(
                f"folders must name one run of each variant and seed; {seeds[seed].folder} and {run.folder} are both "
                f"{run.name} with seed {seed}"
            )
        seeds[seed] = run
    if not found:
        raise LabError("folders must name at least one finished run, got none")
    return found


def _series(by_name: Mapping[str, Mapping[int, Run]], kind: str, value: str) -> dict[str, dict[int, Any]]:
    """Return a recorded value over training tokens, as `accuracy.Curves`."""
    return {
        name: {seed: run.series(kind, "tokens", value) for seed, run in seeds.items()}
        for name, seeds in by_name.items()
    }


def _finish(figure: Figure, by_name: Mapping[str, Mapping[int, Run]]) -> None:
    """Label the x-axes as training tokens, with ticks such as 200k or 1.2M, and add the legend."""
    from matplotlib.ticker import EngFormatter

    for axes in figure.axes:
        axes.set_xlabel("training tokens")
        integer_ticks(axes.xaxis)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    most = max(map(len, by_name.values()))
    legend_below(figure, INTERVALS if most > 2 else TWO_SEEDS if most == 2 else None)


def plot_learning(metrics: Path, variant: str = "vanilla") -> Figure | None:
    """Draw the loss of a finished or unfinished run over steps, and for a task the accuracy of each slice beside it.

    Args:
        metrics: Path of the run's metrics.jsonl.
        variant: Variant of the model, which determines the color of the loss.

    Returns:
        The figure, or None before the first evaluation.
    """
    import numpy as np
    from matplotlib import colormaps

    training, evaluations = (read_metrics(metrics, kind) for kind in ("train", "eval"))
    if not evaluations:
        return None
    names = list(evaluations[-1].get("accuracy", {}))
    titles = ["Loss", "Accuracy by slice"] if names else ["Loss"]
    figure, (axes, *rest) = new_figure(titles, ylabels=["loss (nats per token)", "accuracy"][: len(titles)])
    color = colors_of([variant])[variant]
    axes.plot(*_over_steps(training, lambda line: line["loss"]), color=color, alpha=0.25, label="training loss")
    points = _over_steps(evaluations, lambda line: line["loss"])
    axes.plot(*points, "o-", color=color, markersize=2.5, label="validation loss")
    count_steps(axes)
    for axes in rest:
        shades = colormaps["viridis"](np.linspace(0, 0.95, len(names)))  # slices are ordered, for example by hops
        for name, shade in zip(names, shades, strict=True):
            points = _over_steps(evaluations, lambda line, name=name: line["accuracy"][name])
            axes.plot(*points, "o-", color=shade, markersize=2.5, label=name)
        axes.set_ylim(-0.02, 1.02)
        count_steps(axes)
    legend_below(figure)
    return figure


def _over_steps(lines: Sequence[dict[str, Any]], read: Callable[[dict[str, Any]], float | None]) -> tuple[list, list]:
    """Return steps and values, without evaluations whose value is None, as for a slice without answers."""
    points = [(line["step"], read(line)) for line in lines if read(line) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot_coefficients(folder: Path) -> Figure | None:
    """Draw the learned coefficients of a finished run, one panel each, as layers by heads. None for vanilla."""
    return map_coefficients(read_run(folder).coefficients())


def save_figure(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write STEM.png and STEM.svg, or only one of them; the same figure gives the same bytes.

    An SVG is drawn light on dark if the viewer prefers a dark color scheme.
    """
    import matplotlib

    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    with matplotlib.rc_context({"svg.hashsalt": "kvshift"}):
        for kind, path in zip(kinds, paths, strict=True):
            figure.savefig(path, dpi=150, metadata={"Software" if kind == "png" else "Date": None})
            figure.set_layout_engine("none")  # the layout is final; repeating it takes as long as drawing
            if kind == "svg":
                path.write_text(path.read_text(encoding="utf-8").replace("</style>", f"{_DARK}</style>", 1), "utf-8")
    return paths
