"""Plots of the probes of training over tokens, from run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshift.lab.analysis.accuracy import draw_means
from kvshift.lab.analysis.curves import count_tokens
from kvshift.lab.analysis.panels import INTERVALS, legend_below, new_figure
from kvshift.lab.runs.run import Run, read_run

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.figure import Figure

# Title, which fits on one line, and y-axis label of each probe, by its name in metrics.jsonl.
PANELS = {
    "prefix_matching": ("Prefix matching, best head", "attention"),
    "previous_token": ("Previous token, best head", "attention"),
    "repeat_loss": ("Loss on repeated random tokens", "nats per token"),
    "loss_pair_seen": ("Loss, pair seen before", "nats per token"),
    "loss_token_seen": ("Loss, token seen, pair not", "nats per token"),
    "loss_neither": ("Loss, token not seen before", "nats per token"),
    "late_minus_early": ("Loss at 500 minus that at 50", "nats per token"),
}


def plot_probes(folders: Sequence[Path]) -> Figure | None:
    """Draw a panel for each quantity that `--probes` measured in all finished runs; None if there is none.

    Each line is a mean over seeds, and its band the 95 % interval of that mean.
    """
    by_name: dict[str, dict[int, Run]] = {}
    for run in map(read_run, folders):
        by_name.setdefault(run.name, {})[run.config["seed"]] = run
    lines = [[line for line in run.metrics if line["kind"] == "probes"] for s in by_name.values() for run in s.values()]
    names = [name for name in PANELS if all(of_run and all(name in line for line in of_run) for of_run in lines)]
    if not names:
        return None
    titles, labels = zip(*(PANELS[name] for name in names), strict=True)
    figure, panels = new_figure(titles, ylabels=labels, height=2.6)
    for axes, name in zip(panels, names, strict=True):
        curves: dict[str, dict[int, Any]] = {
            label: {seed: run.series("probes", "tokens", name) for seed, run in seeds.items()}
            for label, seeds in by_name.items()
        }
        draw_means(axes, curves)
        count_tokens(axes)
    legend_below(figure, INTERVALS if any(len(seeds) > 1 for seeds in by_name.values()) else None)
    return figure
