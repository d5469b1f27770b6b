"""`kvshift compare`: the runs that it starts, the files that it keeps, and how it ends."""

import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import kvshift_lab.commands.compare.command as module
from kvshift_lab.commands.compare import report
from kvshift_lab.commands.compare.command import CompareConfig, compare, compare_jobs
from kvshift_lab.core.errors import FolderInUseError, InterruptedRunError, LabError, RunFailedError
from kvshift_lab.core.options import to_json
from kvshift_lab.options_file import parse
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.inputs import identify_inputs
from kvshift_lab.run.resolve import expected_options
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.study import run_study
from kvshift_lab.variants.building import build_model, describe
from kvshift_lab.variants.by_name import VARIANTS
from kvshift_lab.variants.model_config import ModelConfig

from ...analysis.run_folders import write_run
from .test_summary import RATIO


def config_for(out, seeds=1, **train):
    """Return options for the runs alone, so that no models are loaded after them."""
    return CompareConfig(train=TrainConfig(out=out, **train), seeds=seeds, step_time_seconds=0, sample_tokens=0)


def options_of(config, variant, *, seed=0):
    """Return the options of one run of a comparison."""
    (job,) = [job for job in compare_jobs(config) if (job.arm.variant, job.seed) == (variant, seed)]
    return job.config


@pytest.fixture
def trained(monkeypatch):
    """A replacement for the training processes that lists the runs, in order; `problems` are those that fail."""

    class Trained(list):
        problems = ()

        def sweep(self, jobs, *, isolated, done, **options):
            assert isolated
            found = []
            for number, (job, out) in enumerate(jobs):
                name = "/".join(out.parts[-2:])
                self.append(name)
                problem = dict(self.problems).get(name)
                done(number, problem)
                if problem is None:
                    self.write(job, out)
                else:
                    found.append(f"{job.arm}, seed {job.seed}: {problem}")
            return found

        def write(self, job, out):
            model = job.config.model
            targets = ("k", "v") if model.shift_targets is None else model.shift_targets
            gain = 0.1 + 0.01 * job.seed if targets else 0.0
            shutil.rmtree(out, ignore_errors=True)  # may contain a lock file
            write_run(out, seed=job.seed, variant=model.variant, shift_targets=targets, gain=gain)
            recorded = json.loads((out / "config.json").read_text())
            options = json.loads(json.dumps(expected_options(job.config)))
            options["model"] |= {"shift_targets": recorded["model"]["shift_targets"]}
            facts = recorded["data_facts"] | identify_inputs(job.config.data)
            kept = {"tokens_per_step": recorded["tokens_per_step"], "config_hash": recorded["config_hash"]}
            (out / "config.json").write_text(json.dumps({**options, **kept, "data_facts": facts}))

    found = Trained()
    monkeypatch.setattr(run_study, "sweep", found.sweep)
    return found


@pytest.fixture
def unplotted(monkeypatch):
    """Write the report without its plots, which take a second to draw."""
    monkeypatch.setattr(report, "plot_curves", lambda *args, **options: Figure(figsize=(1, 1)))
    monkeypatch.setattr(report, "plot_coefficients", lambda folder: None)


def test_runs_of_one_seed_differ_in_the_shift_alone():
    config = config_for(Path("out"), seed=5, steps=7, model=ModelConfig(hidden_size=64, shift_targets=("v",)))
    vanilla, shifted = (options_of(config, variant, seed=5) for variant in ("vanilla", "kv-shift"))
    assert (vanilla.model.shift_targets, shifted.model.shift_targets) == ((), ("v",))
    assert vanilla.seed == shifted.seed == 5
    assert replace(vanilla, model=shifted.model) == shifted
    assert replace(vanilla.model, shift_targets=("v",)) == shifted.model


def test_runs_that_start_from_a_model_differ_in_the_shift_too():
    config = config_for(Path("out"), init_from="llama")
    assert [options_of(config, name).model.shift_targets for name in ("vanilla", "kv-shift")] == [(), ("k", "v")]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"variants": ("vanilla", "k-shift", "smear"), "equal_parameters": True},
        {"prompt": '-it\'s a "prompt"\n', "temperature": 0.0, "sample_tokens": 7, "step_time_seconds": 0.5},
        {"seeds": 2},
    ],
)
def test_the_next_command_is_the_same_comparison_with_more_seeds(options, tmp_path):
    train = TrainConfig(out=tmp_path / "a folder", steps=7, seed=5, model=ModelConfig(hidden_size=64, qk_norm=False))
    config = CompareConfig(train=train, **options)
    train.out.mkdir()
    (train.out / "compare.json").write_text(json.dumps(to_json(train)))
    words = shlex.split(config.with_seeds(3))
    assert words[:4] == ["python", "-m", "kvshift_lab", "compare"]
    assert parse(CompareConfig, words[4:]) == replace(config, seeds=3)


def test_the_next_command_calls_the_program_as_it_was_called(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "kvshift"), "compare"])
    assert (
        CompareConfig().with_seeds(3).startswith(f"{tmp_path / 'kvshift'} compare --config runs/compare/compare.json ")
    )
    (tmp_path / "kvshift").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert CompareConfig().with_seeds(3).startswith("kvshift compare ")


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_seed_ends_with_the_command_for_three(seeds, tmp_path, trained, unplotted, capsys):
    config = config_for(tmp_path, seeds=seeds)
    compare(config)
    more = config.with_seeds(3)
    assert capsys.readouterr().out.rstrip().endswith(more) == (seeds == 1)
    assert (html.escape(more) in (tmp_path / "report.html").read_text(encoding="utf-8")) == (seeds == 1)


def test_a_file_that_makes_two_variants_the_same_model_is_refused(tmp_path, trained):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"shift_targets": ["k"]}))
    config = config_for(tmp_path / "out", model=ModelConfig(config=path))
    with pytest.raises(LabError, match="kv-shift and k-shift are the same model, K-shift"):
        compare(replace(config, variants=("vanilla", "kv-shift", "k-shift")))
    assert trained == []


def test_a_file_of_a_model_without_shift_is_refused(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 16, "num_attention_heads": 2}
    path.write_text(json.dumps({"model_type": "kvshift_llama", "shift_targets": [], **sizes}))
    config = config_for(tmp_path / "out", model=ModelConfig(config=path))
    with pytest.raises(LabError, match=r"config.json shifts nothing, so that kv-shift equals vanilla"):
        compare_jobs(config)
    shifted = replace(config, train=replace(config.train, model=ModelConfig(config=path, shift_targets=("k",))))
    assert options_of(shifted, "kv-shift").model.shift_targets == ("k",)


@pytest.mark.slow
def test_all_seeds_and_variants_are_run_and_shown(tmp_path, trained, capsys):
    config = replace(config_for(tmp_path / "out", seeds=2, seed=3), variants=("vanilla", "smear", "kv-shift"))
    summary = compare(config)
    assert trained == [f"seed-{seed}/{name}" for seed in (3, 4) for name in ("vanilla", "smear", "kvshift")]
    options = [options_of(config, name, seed=4).model for name in ("vanilla", "smear")]
    assert [model.variant for model in options] == [None, "smear"]
    assert [model.shift_targets for model in options] == [(), ()]
    out = capsys.readouterr().out
    assert list(summary["verdicts"]) == ["smear", "kv-shift"]
    assert "2 seeds" in summary["verdicts"]["kv-shift"]["text"] in out
    for path in re.findall(r"/\S+", out)[-6:]:
        assert Path(path).is_relative_to((tmp_path / "out").resolve())
        assert Path(path).exists()
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    trained.clear()
    again = compare(replace(config, variants=("vanilla", "kv-shift")))
    assert trained == []
    assert list(again["verdicts"]) == ["kv-shift"]


def test_once_finished_it_only_draws(tmp_path, trained, unplotted, capsys):
    compare(config_for(tmp_path / "out"))
    first = (tmp_path / "out" / "report.html").read_bytes()
    for name in ("report.html", "compare.json"):  # also where the trainings were started one by one
        (tmp_path / "out" / name).unlink()
    trained.clear()
    compare(config_for(tmp_path / "out"))
    assert trained == []
    assert "2 of 2 runs are already finished" in capsys.readouterr().err
    assert (tmp_path / "out" / "report.html").read_bytes() == first


def test_seeds_can_be_added_and_left_out(tmp_path, trained, unplotted):
    compare(config_for(tmp_path / "out"))
    trained.clear()
    assert len(compare(config_for(tmp_path / "out", seeds=3))["seeds"]) == 3
    assert trained == ["seed-1/vanilla", "seed-1/kvshift", "seed-2/vanilla", "seed-2/kvshift"]
    assert len(compare(config_for(tmp_path / "out", seeds=2))["seeds"]) == 2
    assert len(trained) == 4


def test_the_runs_besides_one_that_fails_are_kept(tmp_path, trained, unplotted):
    trained.problems = {"seed-1/vanilla": "the loss is not finite"}.items()
    with pytest.raises(RunFailedError, match=r"1 of 4 runs failed.*\n  vanilla, seed 1: the loss is not finite"):
        compare(config_for(tmp_path / "out", seeds=2))
    trained.clear()
    trained.problems = ()
    compare(config_for(tmp_path / "out", seeds=2))
    assert trained == ["seed-1/vanilla"]


def test_equal_parameters_are_recorded(tmp_path, trained, unplotted):
    config = replace(config_for(tmp_path / "out"), variants=("vanilla", "canon", "kv-shift"), equal_parameters=True)
    compare(config)
    widths = {name: options_of(config, name).model.intermediate_size for name in config.variants}
    assert widths["vanilla"] is widths["kv-shift"] is None
    assert (
        json.loads((tmp_path / "out/seed-0/canon/config.json").read_text())["model"]["intermediate_size"]
        == (widths["canon"])
    )
    with pytest.raises(LabError, match="equal_parameters: recorded True, given None"):
        compare(replace(config, equal_parameters=False))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "differential-wide"])  # needs even KV heads
def test_equal_parameters_of_what_is_built(name, tmp_path):
    model = ModelConfig(hidden_size=24, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    train, unit = TrainConfig(out=tmp_path, model=model), 3 * 24 * 2  # parameters per unit of MLP width

    def built(variant, **how):
        """Return the number of parameters and the width of the MLPs."""
        config = CompareConfig(train=train, variants=(variant,), **how)
        options = options_of(config, variant).model
        size = describe(options, vocab_size=31, length=8)
        return build_model(size, seed=0, variant=options.variant).num_parameters(), size.intermediate_size

    vanilla, before = built("vanilla"), built(name)
    parameters, width = built(name, equal_parameters=True)
    assert abs(parameters - vanilla[0]) <= unit / 2
    assert before[0] - parameters == (before[1] - width) * unit
    assert (width < before[1]) == (before[0] - vanilla[0] > unit / 2)


def test_other_options_in_one_folder_are_named(tmp_path, trained, unplotted):
    compare(config_for(tmp_path / "out"))
    trained.clear()
    other = config_for(tmp_path / "out", steps=77, model=ModelConfig(hidden_size=64))
    with pytest.raises(LabError, match=r"model\.hidden_size: recorded None, given 64; steps: recorded 300, given 77"):
        compare(other)
    with pytest.raises(LabError, match="seed: recorded 0, given 1"):
        compare(config_for(tmp_path / "out", seed=1))
    assert trained == []


def test_what_changes_no_number_may_differ(tmp_path, trained, unplotted):
    compare(config_for(tmp_path / "out"))
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    trained.clear()
    compare(config_for(moved, progress=False, report_to=()))
    assert trained == []


FROM_LLAMA = TrainConfig(out=Path("x"), init_from="llama")
KEYS = TrainConfig(out=Path("x"), model=ModelConfig(shift_targets=("k",)))
WIDER = TrainConfig(out=Path("x"), model=ModelConfig(shift_window=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "seeds must be 1 or more, got 0"),
        ({"step_time_seconds": -1.0}, r"step_time_seconds must be 0 or more, got -1\.0"),
        ({"step_time_seconds": float("nan")}, "step_time_seconds must be 0 or more, got nan"),
        ({"sample_tokens": -5}, "sample_tokens must be 0 or more, got -5"),
        ({"temperature": -0.5}, r"temperature must be 0 or more, got -0\.5"),
        ({"prompt": ""}, "prompt must not be empty"),
        ({"train": TrainConfig(out=Path("x"), steps=0)}, "steps must be 1 or more, got 0"),
        ({"train": TrainConfig(out=Path("x"), model=ModelConfig(shift_targets=()))}, r"at least one of q, k, v"),
        ({"variants": ("vanilla",)}, "variants must be two or more different names, got vanilla"),
        ({"variants": ("smear", "vanilla", "smear")}, "two or more different names, got smear vanilla smear"),
        ({"variants": ("vanilla", "kvshift")}, r"variants: there is no variant 'kvshift'; did you mean kv-shift\?"),
        ({"train": TrainConfig(out=Path("x"), model=ModelConfig(variant="smear"))}, r"model\.variant .* is only for"),
        ({"train": FROM_LLAMA, "variants": ("vanilla", "smear")}, "variants has smear, but with init_from only"),
        ({"train": FROM_LLAMA, "equal_parameters": True}, "equal_parameters cannot be combined with init_from"),
        ({"train": WIDER, "variants": ("vanilla", "smear")}, r"model\.shift_window is 3, but applies to none of"),
        ({"train": KEYS, "variants": ("kv-shift", "k-shift")}, "kv-shift and k-shift are the same model, K-shift"),
        ({"train": WIDER, "variants": ("k-shift", "kv-shift-gate")}, r"model\.shift_window is 3, but applies to none"),
    ],
)
def test_options_that_cannot_be(tmp_path, trained, changes, message):
    config = replace(config_for(tmp_path / "out"), **changes)
    with pytest.raises(LabError, match=message) as failure:
        compare(config)
    assert failure.value.exit_code == 2
    assert trained == []
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files(tmp_path, trained):
    (tmp_path / "seed-0").mkdir()  # left by a comparison whose runs did not begin
    (tmp_path / "report.html").write_text("not ours")
    with pytest.raises(LabError, match=r"contains no comparison \(report.html ...\); choose a folder that is new"):
        compare(config_for(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"seed-0", "report.html"}
    assert trained == []


@pytest.mark.parametrize("place", ["file", "file/folder"])
def test_a_folder_that_cannot_be_made(tmp_path, trained, place):
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match=r"out: .* cannot be written to"):
        compare(config_for(tmp_path / place))
    assert trained == []


def test_step_times_of_other_variants_are_not_reported(tmp_path, trained, unplotted):
    config = config_for(tmp_path / "out")
    measured = {"milliseconds": {"vanilla": 2.0, "kv-shift": 3.0}, "ratios": {"kv-shift": RATIO}}
    compare(config)
    (tmp_path / "out" / "step_time.json").write_text(json.dumps(measured))
    assert compare(config)["step_time"] == measured
    assert compare(replace(config, variants=("vanilla", "kv-shift", "smear")))["step_time"] is None


def test_torchrun_would_start_it_several_times(tmp_path, trained, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LabError, match="start it without torchrun"):
        compare(config_for(tmp_path / "out"))


def test_a_report_that_cannot_be_written(tmp_path, trained, unplotted):
    compare(config_for(tmp_path / "out"))
    (tmp_path / "out" / "report.html").unlink()
    (tmp_path / "out" / "report.html").mkdir()
    with pytest.raises(RunFailedError, match=r"report in .* could not be written: .*the runs are kept") as failure:
        compare(config_for(tmp_path / "out"))
    assert failure.value.exit_code == 3
    (tmp_path / "out" / "report.html").rmdir()
    trained.clear()
    compare(config_for(tmp_path / "out"))
    assert trained == []


def test_an_interrupt_between_runs_says_how_to_resume(tmp_path, trained, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_jobs", interrupt)
    with pytest.raises(InterruptedRunError, match="the same command resumes") as failure:
        compare(config_for(tmp_path / "out"))
    assert failure.value.exit_code == 130


def test_two_comparisons_in_one_folder_refuse(tmp_path, trained):
    with RunFolder(tmp_path / "out").locked(), pytest.raises(FolderInUseError):
        compare(config_for(tmp_path / "out"))
    assert trained == []


def test_a_run_that_is_not_finished_is_waited_for(tmp_path, trained, unplotted, capsys):
    folder = tmp_path / "out" / "seed-0" / "vanilla"
    folder.mkdir(parents=True)
    hold = (
        "import sys, time, filelock\n"
        "lock = filelock.FileLock(sys.argv[1])\n"
        "lock.acquire()\n"
        "print(flush=True)\n"
        "time.sleep(0.5)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, folder / ".lock"], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        compare(config_for(tmp_path / "out"))
        assert holder.poll() is not None
    assert "an earlier process is still working in" in capsys.readouterr().err
    assert trained == ["seed-0/vanilla", "seed-0/kvshift"]
