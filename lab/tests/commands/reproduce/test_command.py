"""`kvshift reproduce` runs missing jobs, keeps finished runs and prints the claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvshift_lab import cli
from kvshift_lab.commands.reproduce import command as listing
from kvshift_lab.commands.reproduce import reproduce as module
from kvshift_lab.commands.reproduce.command import list_or_reproduce
from kvshift_lab.commands.reproduce.reproduce import ReproduceConfig, reproduce
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.recipes import catalogue
from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.jobs import Computation
from kvshift_lab.study.recipe import Recipe, without_tuning_runs
from kvshift_lab.study.records import read_records
from kvshift_lab.study.run_study import job_folder

from ...study.cases import Counting, counting_recipe, runs


def drawing(records):
    from matplotlib.figure import Figure

    figure = Figure()
    figure.add_subplot().plot([record.seed for record in records])
    return figure


def claims(records):
    ours = f"{len(records)} beads"
    return [Claim(statement="Beads count", paper="8 beads", ours=ours, direction="holds", note="fewer")]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    notes = ("The paper does not say which beads.",)
    made = replace(counting_recipe("ab"), plot=drawing, claims=claims, notes=notes)
    find = lambda name: made if name == "abacus" else find_recipe(name)  # noqa: E731
    for place in (module, catalogue):
        monkeypatch.setattr(place, "find_recipe", find)
    monkeypatch.setattr(listing, "CATALOGUE", {"abacus": made.entry})
    return made


def config(out: Path, **changes) -> ReproduceConfig:
    return replace(ReproduceConfig(recipe="abacus", preset="smoke", out=out, jobs=1), **changes)


def test_the_list_names_every_recipe_and_what_it_costs(tmp_path: Path):
    words = " ".join(listing.overview(tmp_path).split())
    for entry in CATALOGUE.values():
        assert f"{entry.name} {entry.title}" in words
        assert all(size.cost in words for size in entry.presets.values())


def test_all_is_run_drawn_and_written(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    reproduce(config(tmp_path, results=tmp_path / "kept"))
    folder = tmp_path / "abacus" / "smoke"
    for label in ("beads-a", "beads-b"):
        assert [runs(folder / label / f"seed-{seed}") for seed in (0, 1)] == [1, 1]
    records = read_records(folder / "records.jsonl")
    assert [(record.arm.label, record.seed) for record in records] == [
        ("Beads, a", 0),
        ("Beads, a", 1),
        ("Beads, b", 0),
        ("Beads, b", 1),
    ]
    assert read_records(tmp_path / "kept" / "abacus" / "smoke.jsonl") == records
    assert (folder / "abacus.png").exists()
    assert "| Beads count | 8 beads | 4 beads | fewer | **holds** |" in (folder / "report.md").read_text()
    assert str((folder / "report.md").resolve()) in capsys.readouterr().out


def test_what_is_finished_is_kept(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    reproduce(config(tmp_path, seeds=1))
    reproduce(config(tmp_path, seeds=3))
    folder = tmp_path / "abacus" / "smoke" / "beads-a"
    assert [runs(folder / f"seed-{seed}") for seed in range(3)] == [1, 1, 1]
    assert "2 of 6 runs are already finished" in capsys.readouterr().err


def test_the_seeds_of_a_preset_need_not_begin_at_0(recipe: Recipe, tmp_path: Path, monkeypatch) -> None:
    presets = {"smoke": replace(recipe.presets["smoke"], first_seed=2000)}
    pilot = replace(recipe, entry=replace(recipe.entry, presets=presets))
    monkeypatch.setattr(module, "find_recipe", lambda name: pilot)
    for seeds, expected in ((None, {2000, 2001}), (3, {2000, 2001, 2002})):
        reproduce(config(tmp_path, seeds=seeds))
        assert {record.seed for record in read_records(tmp_path / "abacus/smoke/records.jsonl")} == expected


def test_failed_runs_are_named_and_tried_again(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = replace(recipe, arms=lambda preset: [Counting(label="Beads, a", ends="badly"), Counting(label="b")])
    monkeypatch.setattr(module, "find_recipe", lambda name: failing)
    with pytest.raises(RunFailedError, match=r"1 of 2 runs failed; .*\n  Beads, a, seed 0: the beads are lost"):
        reproduce(config(tmp_path, seeds=1))
    folder = tmp_path / "abacus" / "smoke"
    assert [record.arm.label for record in read_records(folder / "records.jsonl")] == ["b"]
    assert not (folder / "report.md").exists()
    monkeypatch.setattr(module, "find_recipe", lambda name: recipe)
    reproduce(config(tmp_path, seeds=1))
    assert runs(folder / "beads-a" / "seed-0") == 2


def test_kept_records_are_not_replaced_by_fewer(recipe: Recipe, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    reproduce(config(tmp_path, seeds=2, results=kept))
    with pytest.raises(LabError, match=r"smoke\.jsonl has 2 runs that would be lost \(Beads, a, seed 1 "):
        reproduce(config(tmp_path, seeds=1, results=kept))
    reproduce(config(tmp_path, seeds=3, results=kept))
    assert len(read_records(kept / "abacus" / "smoke.jsonl")) == 6


def test_computations_with_other_options_are_not_taken_for_these(tmp_path: Path) -> None:
    job = Computation(arm=Arm(case="sum"), config=Addends(one=3, other=4), function=add)
    assert not job.is_finished(tmp_path / "sum")
    job.run(tmp_path / "sum")
    assert job.is_finished(tmp_path / "sum")
    assert job.record(tmp_path / "sum")["result"] == {"sum": 7}
    with pytest.raises(LabError, match="one: recorded 3, given 5"):
        replace(job, config=Addends(one=5, other=4)).is_finished(tmp_path / "sum")


@dataclass(frozen=True)
class Addends:
    one: int
    other: int


def add(config: Addends) -> dict[str, int]:
    return {"sum": config.one + config.other}


def test_the_list_says_what_is_done(recipe: Recipe, tmp_path: Path) -> None:
    list_or_reproduce(config(tmp_path, seeds=1))
    assert "abacus counting with beads smoke 2 nothing" in " ".join(listing.overview(tmp_path).split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "fig99"}, "there is no recipe 'fig99'; (known: abacus|did you mean fig09)"),
        ({"preset": "huge"}, "preset must be one of smoke, got 'huge'"),
        ({"seeds": 0}, "seeds must be 1 or more, got 0"),
        ({"jobs": 0}, "jobs must be 1 or more, got 0"),
    ],
    ids=["recipe", "preset", "seeds", "jobs"],
)
def test_bad_options_are_named(recipe: Recipe, tmp_path: Path, changes: dict, message: str) -> None:
    for command in (reproduce, list_or_reproduce):
        with pytest.raises(LabError, match=message):
            command(config(tmp_path, **changes))


# Recipes whose jobs are all pairs of a model with KV shift and the same model without.
PAIRED = {"cfg", "decide", "fig04", "fig05", "fig06", "fig08", "fig09", "mqar", "tab04"}
# Their largest preset is not "paper": the paper has no such experiment.
LARGEST = {"both_copy": "full", "fig04c": "laptop"}


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_recipe_has_presets_names_for_its_jobs_and_pairs(name: str) -> None:
    """All configurations are valid, and the models of a pair differ only in the shift and its start values."""
    recipe = find_recipe(name)
    assert recipe.name == name
    assert [*recipe.presets][:2] == ["smoke", "laptop"]
    assert [*recipe.presets][-1] == LARGEST.get(name, "paper")
    for preset in recipe.presets:
        jobs: Any = recipe.jobs(preset, range(2))
        folders = {job_folder(Path(), job) for job in jobs}
        by_name = {(job.arm.label, job.seed): job for job in jobs}
        assert len(folders) == len(by_name) == len(jobs) > 0
        pairs = 0
        for (label, seed), job in by_name.items():
            if isinstance(job, Computation):
                continue
            job.config.check()
            if label.startswith("KV-shift") and (label.replace("KV-shift", "vanilla"), seed) in by_name:
                pairs += 1
                vanilla = by_name[label.replace("KV-shift", "vanilla"), seed].config
                assert job.config.model.shift_targets in (("k", "v"), None)
                without = replace(job.config.model, shift_targets=())
                if name == "both_copy":  # its shift starts as the identity, in a model that is trained already
                    assert without.shift_init == "identity"
                    without = replace(without, shift_init=None)
                assert without == vanilla.model
                assert replace(job.config, model=vanilla.model) == vanilla
        if name in PAIRED and preset != "search":
            assert 2 * pairs == len(jobs)


# Recipes whose `smoke` jobs are all run by other recipes of their study, too.
SAME_RUNS = {"fig05", "fig11", "tab05", "tab06", "tab07", "tab09", "tab10"}


def test_what_is_not_run_here_is_run_for_another_recipe() -> None:
    def jobs(names: Iterable[str]) -> set[str]:
        return {repr((job.arm, job.config)) for name in names for job in find_recipe(name).jobs("smoke", range(1))}

    studies = {CATALOGUE[name].study for name in SAME_RUNS}
    assert None not in studies
    others = [name for name, entry in CATALOGUE.items() if entry.study in studies and name not in SAME_RUNS]
    assert jobs(SAME_RUNS) <= jobs(others)


@pytest.fixture(scope="session")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which recipes of one study find the runs of each other."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in SAME_RUNS])
def test_smoke(name: str, tmp_path: Path, studies: Path, capsys: pytest.CaptureFixture) -> None:
    """The command runs one seed, writes records and a report, and prints the claims."""
    out = tmp_path if CATALOGUE[name].study is None else studies
    code = cli.main(["reproduce", name, "--preset", "smoke", "--out", str(out), "--jobs", "1", "--seeds", "1"])
    assert code == 0
    folder = out / name / "smoke"
    kept = read_records(folder / "records.jsonl")
    records = without_tuning_runs(kept)
    assert len(records) == len(find_recipe(name).jobs("smoke", range(1)))
    for record in kept:
        assert record.environment["commit"] is None or len(record.environment["commit"]) >= 40
        assert len(record.config_hash) == 16
        assert str(out) not in repr(record)
    claimed = find_recipe(name).claims(records)
    assert claimed
    printed = capsys.readouterr().out
    for claim in claimed:
        assert claim.statement in printed
        assert claim.ours in printed
        assert f"| {claim.statement} | {claim.paper} | {claim.ours} |" in (folder / "report.md").read_text()
