"""The results page is made from the records alone, and `--check` detects a stale page."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvshift_lab.core.errors import LabError
from kvshift_lab.recipes import results_pages
from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe
from kvshift_lab.recipes.results_pages import (
    SUMMARY_ROWS,
    PresetClaims,
    archived_claims,
    complete_presets,
    recipe_pages,
    results_page,
    summary_page,
)
from kvshift_lab.study.arm import arm_from_label
from kvshift_lab.study.preset_report import report
from kvshift_lab.study.records import read_records, write_records

from ..study.cases import made_up

OPTIONS = {
    "task": {"name": "induction", "length": 16, "vocab_size": 64},
    "model": {"family": "llama", "hidden_size": 24, "num_hidden_layers": 3},
    "optimizer": {"learning_rate": 0.002},
    "steps": 400,
    "batch_size": 4,
    "accumulation": 2,
}


def curve(*accuracy: float) -> dict[str, list[float]]:
    steps = [float(100 * (number + 1)) for number in range(len(accuracy))]
    return {"step": steps, "loss": [1.0] * len(steps), "first_repeat": [*accuracy]}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder with two seeds of Figure 1a, here a recipe without a study; test_studies.py tests studies."""
    monkeypatch.chdir(tmp_path)
    recipe = find_recipe("fig01a")
    alone = replace(recipe, entry=replace(recipe.entry, study=None))
    monkeypatch.setattr(results_pages, "find_recipe", lambda name: alone if name == "fig01a" else find_recipe(name))
    records = [
        made_up(label, seed, curve=curve(*accuracy, end), options=OPTIONS, processor_seconds=90.0)
        for label, accuracy in {
            "vanilla, 4 layers": (0.1, 0.5, 0.9),
            "vanilla, 2 layers": (0.1, 0.5, 0.9),
            "vanilla, 1 layer": (0.1, 0.1, 0.1),
            "KV-shift, 1 layer": (1.0, 1.0, 1.0),
        }.items()
        for seed, end in ((0, 0.99), (1, 0.995))
    ]
    write_records(tmp_path / "results" / "fig01a" / "laptop.jsonl", records)
    (tmp_path / "docs").mkdir()
    return tmp_path / "results"


def claims_of(results: Path) -> list[PresetClaims]:
    return [*(each.claims for each in complete_presets(results)), *archived_claims(results)]


def test_a_broken_record_is_named(results: Path) -> None:
    path = results / "fig01a" / "laptop.jsonl"
    path.write_text(path.read_text() + '{"label": "x"}\n')
    with pytest.raises(LabError, match=r"laptop\.jsonl:9: not a record of a recipe"):
        read_records(path)


def test_claims_of_an_archived_recipe_keep_their_rows(results: Path) -> None:
    (before,) = claims_of(results)
    (results / "gone").mkdir()
    values = {"seeds": "3", "rates": "one for all", "claims": [asdict(before.claims[0])]}
    (results / "gone" / "archived.json").write_text(json.dumps({"commit": "c0ffee12", "presets": {"long": values}}))
    _, archived = claims_of(results)
    assert archived == replace(before, recipe="gone", preset="long", seeds="3", claims=[before.claims[0]])
    assert "[gone](../results/gone/page.md#long) | long | 3 | one for all |" in results_page([archived])


def test_each_variants_own_rate_is_said_and_the_ends_of_the_grid(results: Path) -> None:
    path = results / "fig01a" / "laptop.jsonl"
    records = read_records(path)
    for rate in (1e-3, 2e-3, 4e-3):
        for label, best in (("vanilla, 2 layers", 4e-3), ("KV-shift, 1 layer", 2e-3)):
            options = {**OPTIONS, "optimizer": {"learning_rate": rate}}
            final = 0.99 if rate == best else 0.5
            records.append(
                replace(
                    made_up(label, 1000, curve=curve(0.1, final), options=options), tuning_for=arm_from_label(label)
                )
            )
    write_records(path, records)
    text = results_page(claims_of(results))
    assert "| best of 3 rates per arm |" in text
    assert "at the same learning rate |" not in text
    (text,) = recipe_pages(complete_presets(results)).values()
    assert "At an end of the grid, so a better rate may lie beyond it: vanilla, 2 layers (0.004)." in text


def test_the_check_sees_a_stale_page(results: Path, capsys: pytest.CaptureFixture) -> None:
    assert results_pages.main(["--dry-run"]) == 2
    assert results_pages.main(["--check"]) == 1  # there is no page yet
    assert results_pages.main([]) == 0
    assert (results / "fig01a" / "laptop.svg").exists()
    assert "Records: [laptop.jsonl](laptop.jsonl)." in (results / "fig01a" / "page.md").read_text()
    assert results_pages.main(["--check"]) == 0
    path = results / "fig01a" / "laptop.jsonl"
    path.write_text(path.read_text().replace("0.995", "0.975"))
    capsys.readouterr()
    assert results_pages.main(["--check"]) == 1
    assert "run `make results`" in capsys.readouterr().err


def test_a_smoke_report_says_that_its_verdicts_mean_nothing(results: Path) -> None:
    recipe = find_recipe("fig01a")
    records = read_records(results / "fig01a" / "laptop.jsonl")
    texts = {
        preset: report(recipe, preset, records, recipe.claims(records), figure="x.svg")
        for preset in ("smoke", "laptop")
    }
    assert "its verdicts mean nothing" in texts["smoke"]
    assert "its verdicts mean nothing" not in texts["laptop"]


PROJECT = Path(__file__).parents[3]


def test_the_summary_says_what_the_results_say_in_a_dozen_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [row.recipe for row in SUMMARY_ROWS if row.recipe in CATALOGUE]
    monkeypatch.setattr(results_pages, "CATALOGUE", dict.fromkeys(needed))
    found = claims_of(PROJECT / "results")
    short = summary_page(found)
    long = (PROJECT / "docs/results.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in short.splitlines() if line.startswith("| ")][1:]
    assert 10 <= len(rows) <= 17
    words = {
        "shown": "holds",
        "contradicted": "fails",
        "not shown": "not shown",
        "not testable here": "not testable here",
    }
    for (_, ours, verdict, _, link), main in zip(rows, SUMMARY_ROWS, strict=True):
        (line,) = [line for line in long.splitlines() if link in line and f"| {main.statement}" in line]
        assert f"| {ours} |" in line
        assert f"**{words[verdict.strip('*')]}**" in line


def test_a_summary_of_a_claim_that_is_gone_is_an_error(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = results_pages.SummaryRow("Something", "fig01a", "laptop", "One layer with KV shift flies")
    monkeypatch.setattr(results_pages, "SUMMARY_ROWS", [row])
    with pytest.raises(LabError, match=r"fig01a laptop must have one claim 'One layer with KV shift flies' .*got 0"):
        summary_page(claims_of(results))
