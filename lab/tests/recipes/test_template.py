"""The recipe of examples/my_recipe, copied as CONTRIBUTING says, runs under another name."""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvshift_lab.recipes
from kvshift_lab import cli
from kvshift_lab.recipes import catalogue

TEMPLATE = Path(__file__).parents[3] / "examples/my_recipe"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy named recall_test, in a second folder of the package `kvshift_lab.recipes`."""
    name, place = "recall_test", tmp_path / "recipes/recall_test"
    shutil.copytree(TEMPLATE, place, ignore=shutil.ignore_patterns("__pycache__"))
    for path in place.glob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace("my_recipe", name), encoding="utf-8")
    monkeypatch.setattr(kvshift_lab.recipes, "__path__", [*kvshift_lab.recipes.__path__, str(place.parent)])
    entry = import_module(f"kvshift_lab.recipes.{name}").ENTRY
    monkeypatch.setitem(catalogue.CATALOGUE, name, entry)  # type: ignore[arg-type]  # a dict
    monkeypatch.setitem(catalogue._FOLDERS, name, (name, entry))
    monkeypatch.setattr(catalogue, "__file__", str(place.parent / "catalogue.py"))  # beside which notes are
    yield name
    for module in [module for module in sys.modules if module.startswith(f"kvshift_lab.recipes.{name}")]:
        del sys.modules[module]


@pytest.mark.slow
def test_a_copy_of_the_template_runs_and_reports(copied: str, tmp_path: Path) -> None:
    assert cli.main(["reproduce", copied, "--preset", "smoke", "--jobs", "1", "--out", str(tmp_path / "runs")]) == 0
    folder = tmp_path / "runs" / copied / "smoke"
    assert {path.name for path in folder.glob("*.*")} >= {"report.md", "records.jsonl", f"{copied}.svg"}
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert "At the end, KV shift has a lower loss" in report
    assert "own best" in report or "learning rate" in report
    assert "What the paper leaves open" in report
