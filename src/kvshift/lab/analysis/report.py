"""The files that `kvshift compare` ends with: table, summary, plots and one HTML page that holds them all."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvshift.lab.analysis.comparison import Pair, explanation, summarize, table
from kvshift.lab.analysis.curves import plot_coefficients, plot_curves, save_figure
from kvshift.lab.analysis.pages import inline, render
from kvshift.lab.analysis.runs import Run, read_json, read_run
from kvshift.lab.analysis.tables import as_markdown

__all__ = ["read_pair", "write_report"]

_TEMPLATE = "report.html.jinja"


def read_pair(out: Path, seed: int) -> Pair:
    """The twins of one seed in the folder of a comparison."""
    folder = out / f"seed-{seed}"
    return Pair(seed, read_run(folder / "vanilla"), read_run(folder / "kvshift"))


def write_report(out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Draw everything again from the files in the folder of a comparison.

    Reads the runs of `seeds`, and step_time.json and samples.json where they are there. Writes summary.json, table.md,
    curves.png and .svg, coefficients-seed-S.png and .svg, and report.html.

    Returns:
        The summary; see `comparison.summarize`.
    """
    pairs = [read_pair(out, seed) for seed in seeds]
    step_time, samples = (_read_if_there(out / name) for name in ("step_time.json", "samples.json"))
    summary = summarize(pairs, step_time)
    rows = table(summary)
    _write(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    text = f"{as_markdown(rows)}\n\n{explanation(summary)}\n\nValidation loss: {summary['verdict']['text']}.\n"
    _write(out / "table.md", text)

    curves = save_figure(plot_curves([run.folder for pair in pairs for run in pair.sides.values()]), out / "curves")
    coefficients = []
    for pair in pairs:
        figure = plot_coefficients(pair.shifted.folder)
        if figure is not None:
            images = save_figure(figure, out / f"coefficients-seed-{pair.seed}")
            coefficients.append({"seed": pair.seed, "image": inline(images[1])})
    runs = [(pair.seed, run) for pair in pairs for run in pair.sides.values()]
    page = render(
        _TEMPLATE,
        title=f"{summary['names']['shifted']} and {summary['names']['vanilla']}",
        verdict=summary["verdict"]["text"],
        table=rows,
        explanation=explanation(summary),
        curves=inline(curves[1]),
        coefficients=coefficients,
        samples=samples,
        runs=[_description(seed, run) for seed, run in runs],
        config=json.dumps(pairs[0].vanilla.config, indent=1),
        environment=json.dumps(pairs[0].vanilla.environment, indent=1),
    )
    _write(out / "report.html", page)
    return summary


def _description(seed: int, run: Run) -> dict[str, Any]:
    command = shlex.join(["kvshift", *run.environment["command"][1:]])
    return {"name": run.name, "seed": seed, "folder": str(run.folder.resolve()), "command": command}


def _read_if_there(path: Path) -> Any:
    return read_json(path) if path.exists() else None


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
