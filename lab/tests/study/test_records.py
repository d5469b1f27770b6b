"""A study resumes from its stored records, without the folders of its runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from kvshift_lab.commands.reproduce import reproduce as module
from kvshift_lab.commands.reproduce.reproduce import ReproduceConfig, reproduce
from kvshift_lab.core import atomic
from kvshift_lab.core.errors import FolderInUseError, InterruptedRunError, LabError
from kvshift_lab.recipes import results_pages
from kvshift_lab.recipes.catalogue import find_recipe
from kvshift_lab.recipes.mqar import study as mqar
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.resolve import expected_options
from kvshift_lab.study import jobs as kinds
from kvshift_lab.study import run_study
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.jobs import TrainingJob
from kvshift_lab.study.recipe import Job, Record
from kvshift_lab.study.records import RecordStore, read_records, write_records
from kvshift_lab.study.run_study import job_folder

from .cases import Counting, counting_recipe, made_up, runs

MACHINE_SPECIFIC = ("seconds", "processor_seconds", "peak_memory_bytes")


@dataclass(frozen=True, kw_only=True)
class Beads(Counting):
    """A job with one seed, which a test may change without the job of the same arm with another seed."""

    def with_seeds(self, seeds: Sequence[int]) -> Sequence[Job]:
        return [self] if self.seed in seeds else []


@pytest.fixture
def beads(monkeypatch: pytest.MonkeyPatch) -> list[Counting]:
    """The jobs of a recipe that trains nothing. A test may change them."""
    jobs: list[Counting] = [Beads(label=f"Beads, {kind}", seed=seed) for kind in "ab" for seed in (0, 1)]
    recipe = replace(counting_recipe(""), arms=lambda preset: jobs)
    monkeypatch.setattr(module, "find_recipe", lambda name: recipe)
    return jobs


def config(path: Path, recipe: str = "abacus", **changes: Any) -> ReproduceConfig:
    made = ReproduceConfig(recipe=recipe, preset="smoke", out=path / "out", results=path / "kept", jobs=1)
    return replace(made, **changes)


def store(path: Path) -> RecordStore:
    return RecordStore(path / "kept", "abacus", "smoke")


def stop_after(beads: list[Counting], number: int, path: Path) -> list[Record]:
    """Run this many of the jobs, interrupt the study, and return its stored records."""
    good = beads[number]
    beads[number] = replace(good, ends="interrupted")
    with pytest.raises(InterruptedRunError):
        reproduce(config(path))
    beads[number] = good
    return read_records(store(path).partial_path)


@pytest.mark.slow
def test_a_study_with_a_grid_resumes_without_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The study is interrupted among its four tuning runs, then among its two reported runs."""

    def arms(preset: str) -> list[TrainingJob]:
        return [replace(job, config=replace(job.config, steps=1)) for job in mqar.arms(preset)[2:]]

    recipe = replace(mqar.RECIPE, arms=arms, claims=lambda records: [], plot=lambda records: Figure())
    monkeypatch.setattr(module, "find_recipe", lambda name: recipe)
    train, ran = kinds.train_task, []

    def train_until(end: int) -> None:
        def training(config: Any) -> dict[str, Any]:
            if len(ran) == end:
                raise InterruptedRunError("told to end")
            ran.append(config)
            return train(config)

        monkeypatch.setattr(kinds, "train_task", training)

    partial = tmp_path / "kept" / "mqar" / "smoke.partial.jsonl"
    for end in (3, 5):
        train_until(end)
        with pytest.raises(InterruptedRunError):
            reproduce(config(tmp_path, "mqar"))
        assert len(read_records(partial)) == end
        shutil.rmtree(tmp_path / "out")
    kept = read_records(partial)
    train_until(99)
    capsys.readouterr()
    reproduce(config(tmp_path, "mqar"))
    said = capsys.readouterr().err
    assert f"4 of 4 runs are already finished: 4 in {partial}" in said
    assert f"1 of 2 runs are already finished: 1 in {partial}" in said
    assert len(ran) == 6
    assert not partial.exists()
    records = read_records(tmp_path / "kept" / "mqar" / "smoke.jsonl")
    assert records[:5] == kept

    reproduce(config(tmp_path / "at-once", "mqar"))
    for one, other in zip(records, read_records(tmp_path / "at-once/kept/mqar/smoke.jsonl"), strict=True):
        assert _numbers(one) == _numbers(other)


def _numbers(record: Record) -> dict[str, Any]:
    result = {name: value for name, value in record.result.items() if name not in MACHINE_SPECIFIC}
    return {**vars(record), "environment": None, "result": result}


def test_what_is_kept_is_not_run_again(beads: list[Counting], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    kept = stop_after(beads, 2, tmp_path)
    assert [(record.arm.label, record.seed) for record in kept] == [("Beads, a", 0), ("Beads, a", 1)]
    shutil.rmtree(tmp_path / "out")
    reproduce(config(tmp_path))
    assert [runs(job_folder(tmp_path / "out/abacus/smoke", job)) for job in beads] == [0, 0, 1, 1]
    assert read_records(store(tmp_path).complete_path)[:2] == kept
    assert not store(tmp_path).partial_path.exists()
    shutil.rmtree(tmp_path / "out")
    capsys.readouterr()
    reproduce(config(tmp_path))
    assert f"4 of 4 runs are already finished: 4 in {store(tmp_path).complete_path}" in capsys.readouterr().err
    assert [runs(job_folder(tmp_path / "out/abacus/smoke", job)) for job in beads] == [0, 0, 0, 0]
    assert not store(tmp_path).partial_path.exists()


def test_a_partial_record_of_other_options_is_refused(beads: list[Counting], tmp_path: Path) -> None:
    stop_after(beads, 2, tmp_path)
    shutil.rmtree(tmp_path / "out")
    before = store(tmp_path).partial_path.read_bytes()
    beads[1] = replace(beads[1], beads=8)
    beads[1].run(job_folder(tmp_path / "out/abacus/smoke", beads[1]))  # the new job is finished, too
    with pytest.raises(LabError, match=r"partial\.jsonl holds Beads, a, seed 1, .*\n  beads: recorded 7, given 8"):
        reproduce(config(tmp_path))
    assert store(tmp_path).partial_path.read_bytes() == before
    assert not (tmp_path / "out/abacus/smoke/beads-b").exists()


def test_records_of_an_older_setting_stay_until_all_are_new(beads: list[Counting], tmp_path: Path) -> None:
    """The old records are of runs that no job repeats, or of the same runs with other options."""
    old = [replace(made_up(f"Beads, {kind}", 0, options={"beads": 6}), tuning_for=Arm(case="Beads")) for kind in "ab"]
    for records in (old, [replace(record, tuning_for=None) for record in old]):
        write_records(store(tmp_path).complete_path, records)
        before = store(tmp_path).complete_path.read_bytes()
        stop_after(beads, 2, tmp_path)
        assert store(tmp_path).complete_path.read_bytes() == before
        reproduce(config(tmp_path))
        assert [record.options["beads"] for record in read_records(store(tmp_path).complete_path)] == [7] * 4
        shutil.rmtree(tmp_path / "out")


def test_partial_records_are_not_lost_by_fewer_seeds(beads: list[Counting], tmp_path: Path) -> None:
    stop_after(beads, 2, tmp_path)
    with pytest.raises(LabError, match=r"partial\.jsonl has 1 runs that would be lost \(Beads, a, seed 1 "):
        reproduce(config(tmp_path, seeds=1))


def test_what_another_process_has_finished_is_kept_while_it_works(beads: list[Counting], tmp_path: Path) -> None:
    """That process may have been started without results, or by an older version: its folders show what is finished."""
    folder = tmp_path / "out/abacus/smoke"
    for job in beads[:2]:
        job.run(job_folder(folder, job))
    with RunFolder(folder).locked(), pytest.raises(FolderInUseError, match="in use by another process"):
        reproduce(config(tmp_path))
    assert [record.seed for record in read_records(store(tmp_path).partial_path)] == [0, 1]
    assert [runs(job_folder(folder, job)) for job in beads] == [1, 1, 0, 0]


def test_half_a_job_is_not_taken_and_not_touched(beads: list[Counting], tmp_path: Path) -> None:
    """Training has ended, and another process is writing the files that follow."""
    job: Any = find_recipe("fig08").jobs("smoke", range(1))[0]
    TrainingJob.run(job, tmp_path)
    part = tmp_path / ".errors.json.part"
    part.write_text("{")
    assert (tmp_path / "result.json").exists()
    assert run_study._record_in(job, tmp_path) is None
    assert part.exists()


def test_two_processes_add_to_one_file(tmp_path: Path) -> None:
    first, second = store(tmp_path), store(tmp_path)
    first.add([made_up("a")])
    second.add([made_up("b")])
    first.add([made_up("a"), made_up("c")])
    assert [record.arm.label for record in read_records(first.partial_path)] == ["a", "b", "c"]


def test_a_process_killed_while_it_writes_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def fsync(number: int) -> None:
        raise Killed

    store(tmp_path).add([made_up("a")])
    before = store(tmp_path).partial_path.read_bytes()
    monkeypatch.setattr(atomic.os, "fsync", fsync)
    with pytest.raises(Killed):
        store(tmp_path).add([made_up("b")])
    monkeypatch.undo()
    assert store(tmp_path).partial_path.with_name(".smoke.partial.jsonl.part").exists()
    assert store(tmp_path).partial_path.read_bytes() == before
    store(tmp_path).add([made_up("c")])
    assert [record.arm.label for record in read_records(store(tmp_path).partial_path)] == ["a", "c"]


def test_what_a_run_filled_in_does_not_differ() -> None:
    """Device, precision and vocabulary are filled in, and facts about the data are not compared."""
    job: Any = find_recipe("decide").jobs("laptop", [0])[0]
    asked = expected_options(job.config)
    assert asked["device"] == "auto"
    filled = {
        **asked,
        "device": "cpu",
        "bf16": "no",
        "tokens_per_step": 4096,
        "model": {**asked["model"], "vocab_size": 512},
        "data_facts": {"tokens": 512},
    }
    assert job.other_options(filled) == []
    assert job.other_options({**filled, "steps": 2}) == [f"steps: recorded 2, given {job.config.steps}"]


def test_the_page_ignores_partial_records(beads: list[Counting], tmp_path: Path) -> None:
    before = results_pages.recipe_pages(results_pages.complete_presets(tmp_path))
    write_records(tmp_path / "fig01a" / "laptop.partial.jsonl", [made_up("vanilla, 2 layers")])
    assert results_pages.recipe_pages(results_pages.complete_presets(tmp_path)) == before


def test_a_folder_of_results_that_cannot_be_made_is_refused_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(LabError, match=r"results: .*kept/abacus cannot be created"):
        store(tmp_path)
