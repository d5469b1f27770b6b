"""`kvshift reproduce` without a recipe: list all recipes and their progress. Imports nothing that is slow to import."""

from __future__ import annotations

from pathlib import Path

from kvshift_lab.analysis.tables import as_text
from kvshift_lab.commands.reproduce.options import ReproduceConfig
from kvshift_lab.core.errors import LabError, nearest
from kvshift_lab.recipes.catalogue import CATALOGUE


def list_or_reproduce(config: ReproduceConfig) -> None:
    """List all recipes, or reproduce the one that is named; see `kvshift_lab.commands.reproduce.reproduce`."""
    config.check()
    if config.recipe is None:
        print(overview(config.out))
        return
    if config.recipe not in CATALOGUE:
        raise LabError(f"there is no recipe {config.recipe!r}; {nearest(config.recipe, CATALOGUE)}")
    if config.preset not in (presets := CATALOGUE[config.recipe].presets):
        raise LabError(f"preset must be one of {', '.join(presets)}, got {config.preset!r}")
    from kvshift_lab.commands.reproduce.reproduce import reproduce

    reproduce(config)


def overview(out: Path) -> str:
    """Return a table with the cost of each recipe's presets and how many of its (or its study's) runs are finished."""
    rows: list[tuple[str, ...]] = [("recipe", "preset", "runs done", "cost")]
    for entry in CATALOGUE.values():
        rows.append((entry.name, entry.title))
        for preset, size in entry.presets.items():
            done = sum(1 for _ in (out / entry.runs / preset).glob("*/seed-*/result.json"))
            of = f" of {entry.study}" if entry.study else ""
            rows.append(("", preset, f"{done}{of}" if done else "-", size.cost))
    return as_text(rows, left=None, width=100)
