"""`kvshift reproduce`: the paper's figures and tables, run again.

OUT/RECIPE/PRESET/LABEL/seed-S/    the folder of one job; finished jobs are kept, interrupted jobs resume
OUT/RECIPE/PRESET/records.jsonl    the records of all jobs, one per line; the figure and the report are made from them
OUT/RECIPE/PRESET/RECIPE.png, .svg, report.md
OUT/STUDY/PRESET/LABEL/seed-S/     replaces the first folder where recipes share the runs of a study

With RESULTS, each record is also saved there as soon as its run has ended, and runs that have a record there are
skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvshift_lab.analysis.curves import save_figure
from kvshift_lab.commands.reproduce.options import ReproduceConfig
from kvshift_lab.core.atomic import write_bytes
from kvshift_lab.core.errors import LabError
from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.preset_report import SMOKE, report
from kvshift_lab.study.recipe import Recipe, Record, without_tuning_runs
from kvshift_lab.study.records import RecordStore, write_records
from kvshift_lab.study.run_study import StudyExecution, run_study


def reproduce(config: ReproduceConfig) -> None:
    """Run the missing jobs of a recipe, draw its figure, and print our numbers beside the paper's.

    Raises:
        LabError: an option or a folder is invalid.
        RunFailedError: at least one run failed; the others are kept.
        InterruptedRunError: a signal interrupted the runs.
    """
    config.check()
    if config.recipe is None:
        raise LabError(f"recipe must be one of {', '.join(CATALOGUE)}, got None")
    recipe = find_recipe(config.recipe)
    if config.preset not in recipe.presets:
        raise LabError(f"preset must be one of {', '.join(recipe.presets)}, got {config.preset!r}")
    preset = recipe.presets[config.preset]
    folder = config.out / recipe.name / config.preset
    runs = config.out / recipe.entry.runs / config.preset
    store = None
    if config.results is not None:
        is_shared = recipe.entry.study is not None
        store = RecordStore(config.results, recipe.entry.runs, config.preset, shared=is_shared)
    execution = StudyExecution(runs=runs, folder=folder, store=store, workers=config.jobs, cluster=config.cluster)
    records = run_study(
        recipe, config.preset, preset.seed_numbers(config.seeds), execution, bundled_text=config.bundled_text
    )
    with RunFolder(folder).locked():
        write_records(folder / "records.jsonl", records)
        _show(recipe, config, folder, store, records)


def _show(
    recipe: Recipe, config: ReproduceConfig, folder: Path, store: RecordStore | None, records: Sequence[Record]
) -> None:
    shown = without_tuning_runs(records)
    claims = recipe.claims(shown)
    images = save_figure(recipe.plot(shown), folder / recipe.name)
    page = folder / "report.md"
    write_bytes(page, report(recipe, config.preset, records, claims, figure=f"{recipe.name}.svg").encode())
    if store is not None:
        store.complete(records)
    print(f"\n{_text(claims)}\n")
    if config.preset == "smoke":
        print(f"{SMOKE}.\n")
    written = [("report", page), ("records", folder / "records.jsonl"), *(("figure", image) for image in images)]
    for what, path in written:
        print(f"{what:<8} {path.resolve()}")


def _text(claims: Sequence[Claim]) -> str:
    parts = []
    for claim in claims:
        rows = [("paper:", claim.paper), ("ours:", claim.ours), ("note:", claim.note)]
        detail = "\n".join(f"    {name:<7}{text}" for name, text in rows)
        parts.append(f"{claim.direction.upper():<9} {claim.statement}\n{detail}")
    return "\n".join(parts)
