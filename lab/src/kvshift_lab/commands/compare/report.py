"""The report of `kvshift compare`: table, summary, plots, and one HTML page that contains them all."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvshift_lab.analysis.curves import plot_coefficients, plot_curves, plot_probes, save_figure
from kvshift_lab.analysis.pages import inline, render
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.commands.compare.summary import legend, table
from kvshift_lab.core.atomic import read_json
from kvshift_lab.run.finished import read_run
from kvshift_lab.study.recipe import Record

_TEMPLATE = "report.html.jinja"


def run_folder(out: Path, seed: int, variant: str) -> Path:
    """Return the folder of one seed's run of a variant in a comparison, such as OUT/seed-0/kvshift."""
    return out / f"seed-{seed}" / variant.replace("-", "")


def verdicts(summary: dict[str, Any]) -> str:
    """Return the verdicts on each variant against the baseline, in words."""
    return "; ".join(found["text"] for found in summary["verdicts"].values())


def write_report(out: Path, records: Sequence[Record], summary: dict[str, Any], *, more: str | None = None) -> None:
    """Write the report of a comparison to its folder, replacing an earlier report.

    Reads the folders of the runs, and samples.json if it exists. Writes summary.json, table.md, curves.png and .svg,
    probes.png and .svg if there are probes, coefficients-seed-S.png and .svg, and report.html.

    Args:
        out: Folder of the comparison.
        records: Records of the runs; the variant of the first is the baseline.
        summary: Their numbers; see `kvshift_lab.commands.compare.summary.summarize`.
        more: Command that runs more seeds, shown on the page. None: show no command.
    """
    rows, explanation = table(summary), legend(summary)
    _write(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    text = f"{as_markdown(rows)}\n\n{explanation}\n\nValidation loss: {verdicts(summary)}.\n"
    _write(out / "table.md", text)

    runs = [read_run(run_folder(out, record.seed, str(record.arm.variant))) for record in records]
    folders, baseline = [run.folder for run in runs], runs[0]
    curves = save_figure(plot_curves(folders, baseline=baseline.name), out / "curves")
    probes = plot_probes(folders)
    coefficients = []
    for record, run in zip(records, runs, strict=True):
        figure = plot_coefficients(run.folder)
        if figure is not None:
            variant = "" if run.folder.name == "kvshift" else f"{run.folder.name}-"
            images = save_figure(figure, out / f"coefficients-{variant}seed-{record.seed}")
            coefficients.append({"name": run.name, "seed": record.seed, "image": inline(images[1])})
    samples = out / "samples.json"
    page = render(
        _TEMPLATE,
        title=" and ".join(reversed(summary["names"].values())),
        verdict=verdicts(summary),
        more=more,
        rows=rows,
        explanation=explanation,
        curves=inline(curves[1]),
        probes=probes and inline(save_figure(probes, out / "probes")[1]),
        coefficients=coefficients,
        samples=read_json(samples) if samples.exists() else None,
        runs=[
            {
                "name": run.name,
                "seed": record.seed,
                "command": shlex.join(["kvshift", "train", "--config", str(run.folder.resolve() / "config.json")]),
            }
            for record, run in zip(records, runs, strict=True)
        ],
        command=shlex.join(["kvshift", *baseline.environment["command"][1:]]),
        config=json.dumps(baseline.config, indent=1),
        environment=json.dumps(baseline.environment, indent=1),
    )
    _write(out / "report.html", page)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
