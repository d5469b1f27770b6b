"""The report of `kvshift compare`: table, summary, plots, and one HTML page that contains them all."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvshift_lab.analysis.comparison import PairedRuns, legend, summarize, table
from kvshift_lab.analysis.curves import plot_coefficients, plot_curves, plot_probes, save_figure
from kvshift_lab.analysis.pages import inline, render
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.core.atomic import read_json
from kvshift_lab.run.finished import Run, read_run
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA

_TEMPLATE = "report.html.jinja"

_BASELINE_FIRST = SHIFTED_AND_VANILLA[::-1]


def run_folder(out: Path, seed: int, variant: str) -> Path:
    """Return the folder of one seed's run of a variant in a comparison, such as OUT/seed-0/kvshift."""
    return out / f"seed-{seed}" / variant.replace("-", "")


def read_paired_runs(out: Path, seed: int, variants: Sequence[str] = _BASELINE_FIRST) -> PairedRuns:
    """Read the paired runs of one seed from the folder of a comparison."""
    return PairedRuns(seed, {variant: read_run(run_folder(out, seed, variant)) for variant in variants})


def verdicts(summary: dict[str, Any]) -> str:
    """Return the verdicts on each variant against the baseline, in words."""
    return "; ".join(found["text"] for found in summary["verdicts"].values())


def write_report(
    out: Path, seeds: Sequence[int], variants: Sequence[str] = _BASELINE_FIRST, *, more: str | None = None
) -> dict[str, Any]:
    """Write the report of a comparison from the files in its folder, replacing an earlier report.

    Reads the runs of `seeds`, and step_time.json and samples.json if they exist. Writes summary.json, table.md,
    curves.png and .svg, probes.png and .svg if there are probes, coefficients-seed-S.png and .svg, and report.html.

    Args:
        out: Folder of the comparison.
        seeds: Seeds of the runs.
        variants: Variants to include; the first is the baseline.
        more: Command that runs more seeds, shown on the page. None: show no command.

    Returns:
        The summary; see `comparison.summarize`.
    """
    paired_runs = [read_paired_runs(out, seed, variants) for seed in seeds]
    samples = _read_if_there(out / "samples.json")
    summary = summarize(paired_runs, _read_if_there(out / "step_time.json"))
    rows = table(summary)
    _write(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    text = f"{as_markdown(rows)}\n\n{legend(summary)}\n\nValidation loss: {verdicts(summary)}.\n"
    _write(out / "table.md", text)

    runs = [(each.seed, run) for each in paired_runs for run in each.runs.values()]
    baseline = paired_runs[0].baseline
    curves = save_figure(plot_curves([run.folder for _, run in runs], baseline=baseline.name), out / "curves")
    probes = plot_probes([run.folder for _, run in runs])
    coefficients = []
    for seed, run in runs:
        figure = plot_coefficients(run.folder)
        if figure is not None:
            variant = "" if run.folder.name == "kvshift" else f"{run.folder.name}-"
            images = save_figure(figure, out / f"coefficients-{variant}seed-{seed}")
            coefficients.append({"name": run.name, "seed": seed, "image": inline(images[1])})
    page = render(
        _TEMPLATE,
        title=" and ".join(reversed(summary["names"].values())),
        verdict=verdicts(summary),
        more=more,
        rows=rows,
        explanation=legend(summary),
        curves=inline(curves[1]),
        probes=probes and inline(save_figure(probes, out / "probes")[1]),
        coefficients=coefficients,
        samples=samples,
        runs=[_description(seed, run) for seed, run in runs],
        config=json.dumps(baseline.config, indent=1),
        environment=json.dumps(baseline.environment, indent=1),
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
