"""`kvshift compare`: the runs that it starts, the files that it keeps, and how it ends."""

import html
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import kvshift_lab.commands.compare.command as module
from kvshift_lab.analysis import report
from kvshift_lab.commands.compare import training_process
from kvshift_lab.commands.compare.command import CompareConfig, child_config, compare
from kvshift_lab.commands.compare.training_process import TrainingError
from kvshift_lab.core.errors import FolderInUseError, LabError, RunFailedError
from kvshift_lab.options_file import parse
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.variants.building import build_model, describe
from kvshift_lab.variants.by_name import VARIANTS
from kvshift_lab.variants.model_config import ModelConfig

from ...analysis.run_folders import write_run


def config_for(out, seeds=1, **train):
    """Return options for the runs alone, so that no models are loaded after them."""
    return CompareConfig(train=TrainConfig(out=out, **train), seeds=seeds, step_time_seconds=0, sample_tokens=0)


@pytest.fixture
def children(monkeypatch):
    """A replacement for the training processes that lists the runs started, in order; `codes` are their exit codes."""

    class Children(list):
        codes = ()

        def run(self, command):
            assert command[:5] == [sys.executable, "-P", "-m", "kvshift_lab", "train"]
            config = parse(TrainConfig, command[5:])
            name = "/".join(config.out.parts[-2:])
            self.append(name)
            code = dict(self.codes).get(name, 0)
            if code == 0:
                targets = ("k", "v") if config.model.shift_targets is None else config.model.shift_targets
                gain = 0.1 + 0.01 * config.seed if targets else 0.0
                if config.out.exists():
                    config.out.joinpath(".lock").unlink(missing_ok=True)
                    config.out.rmdir()
                variant = config.model.variant
                write_run(config.out, seed=config.seed, variant=variant, shift_targets=targets, gain=gain)
            return code

    found = Children()
    monkeypatch.setattr(training_process, "_run", found.run)
    return found


@pytest.fixture
def unplotted(monkeypatch):
    """Write the report without its plots, which take a second to draw."""
    monkeypatch.setattr(report, "plot_curves", lambda *args, **options: Figure(figsize=(1, 1)))
    monkeypatch.setattr(report, "plot_coefficients", lambda folder: None)


def test_twins_differ_in_the_shift_alone():
    train = TrainConfig(out=Path("out"), steps=7, model=ModelConfig(hidden_size=64, shift_targets=("v",)))
    vanilla, shifted = (child_config(train, 5, variant) for variant in ("vanilla", "kv-shift"))
    assert (vanilla.out, shifted.out) == (Path("out/seed-5/vanilla"), Path("out/seed-5/kvshift"))
    assert (vanilla.model.shift_targets, shifted.model.shift_targets) == ((), ("v",))
    assert vanilla.seed == shifted.seed == 5
    assert replace(vanilla, out=shifted.out, model=shifted.model) == shifted
    assert replace(vanilla.model, shift_targets=("v",)) == shifted.model


def test_twins_that_start_from_a_model_differ_in_the_shift_too():
    train = TrainConfig(out=Path("out"), init_from="llama")
    targets = [child_config(train, 0, variant).model.shift_targets for variant in ("vanilla", "kv-shift")]
    assert targets == [(), ("k", "v")]


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
    module._adopt_folder(config)
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
def test_one_seed_ends_with_the_command_for_three(seeds, tmp_path, children, unplotted, capsys):
    config = config_for(tmp_path, seeds=seeds)
    compare(config)
    more = config.with_seeds(3)
    assert capsys.readouterr().out.rstrip().endswith(more) == (seeds == 1)
    assert (html.escape(more) in (tmp_path / "report.html").read_text(encoding="utf-8")) == (seeds == 1)


@pytest.mark.slow
def test_all_seeds_and_variants_are_run_and_shown(tmp_path, children, capsys):
    config = replace(config_for(tmp_path / "out", seeds=2, seed=3), variants=("vanilla", "smear", "kv-shift"))
    summary = compare(config)
    assert children == [f"seed-{seed}/{name}" for seed in (3, 4) for name in ("vanilla", "smear", "kvshift")]
    options = [json.loads((tmp_path / "out" / "seed-4" / f"{n}.json").read_text()) for n in ("vanilla", "smear")]
    assert [each["model"]["variant"] for each in options] == [None, "smear"]
    assert [each["model"]["shift_targets"] for each in options] == [[], []]
    out, err = capsys.readouterr()
    assert f"seed 3, vanilla (1 of 6): kvshift train --config {tmp_path / 'out' / 'seed-3' / 'vanilla.json'}\n" in err
    assert list(summary["verdicts"]) == ["smear", "kv-shift"]
    assert "2 seeds" in summary["verdicts"]["kv-shift"]["text"] in out
    assert re.search(r"^ +vanilla +smear +KV-shift +smear to vanilla +KV-shift to vanilla$", out, re.MULTILINE)
    assert re.search(r"^validation loss, seed 4 ", out, re.MULTILINE)
    for path in re.findall(r"/\S+", out)[-6:]:
        assert Path(path).is_relative_to((tmp_path / "out").resolve())
        assert Path(path).exists()
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    children.clear()
    again = compare(replace(config, variants=("vanilla", "kv-shift")))
    assert children == []
    assert list(again["verdicts"]) == ["kv-shift"]


def test_once_finished_it_only_draws(tmp_path, children, unplotted, capsys):
    compare(config_for(tmp_path / "out"))
    first = (tmp_path / "out" / "report.html").read_bytes()
    (tmp_path / "out" / "report.html").unlink()
    children.clear()
    compare(config_for(tmp_path / "out"))
    assert children == []
    assert "already finished" in capsys.readouterr().err
    assert (tmp_path / "out" / "report.html").read_bytes() == first


def test_seeds_can_be_added_and_left_out(tmp_path, children, unplotted):
    compare(config_for(tmp_path / "out"))
    children.clear()
    assert len(compare(config_for(tmp_path / "out", seeds=3))["seeds"]) == 3
    assert children == ["seed-1/vanilla", "seed-1/kvshift", "seed-2/vanilla", "seed-2/kvshift"]
    assert len(compare(config_for(tmp_path / "out", seeds=2))["seeds"]) == 2
    assert len(children) == 4


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        (3, 3, "exit code 3"),
        (2, 2, "exit code 2"),
        (1, 1, "exit code 1"),
        (-9, 137, "signal SIGKILL"),
        (130, 130, "signal SIGINT"),
    ],
)
def test_a_failed_run_ends_it_and_the_others_are_kept(tmp_path, children, unplotted, code, exit_code, words):
    children.codes = {"seed-1/vanilla": code}.items()
    with pytest.raises(TrainingError, match=rf"seed 1, vanilla \(3 of 4\): training ended with {words}") as failure:
        compare(config_for(tmp_path / "out", seeds=2))
    assert failure.value.exit_code == exit_code
    assert (tmp_path / "out" / "seed-0" / "kvshift" / "result.json").exists()
    children.clear()
    children.codes = ()
    compare(config_for(tmp_path / "out", seeds=2))
    assert children == ["seed-1/vanilla", "seed-1/kvshift"]


def test_equal_parameters_are_recorded(tmp_path, children, unplotted):
    config = replace(config_for(tmp_path / "out"), variants=("vanilla", "canon", "kv-shift"), equal_parameters=True)
    compare(config)
    options = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out" / "seed-0").glob("*.json")}
    widths = {name: values["model"]["intermediate_size"] for name, values in options.items()}
    canon = child_config(config.train, 0, "canon", equal_parameters=True).model.intermediate_size
    assert widths == {"vanilla": None, "canon": canon, "kvshift": None}
    with pytest.raises(LabError, match="equal_parameters: recorded True, given None"):
        compare(replace(config, equal_parameters=False))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "differential-wide"])  # needs even KV heads
def test_equal_parameters_of_what_is_built(name, tmp_path):
    model = ModelConfig(hidden_size=24, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    train, unit = TrainConfig(out=tmp_path, model=model), 3 * 24 * 2  # parameters per unit of MLP width

    def built(variant, **how):
        """Return the number of parameters and the width of the MLPs."""
        options = child_config(train, 0, variant, **how).model
        size = describe(options, vocab_size=31, length=8)
        return build_model(size, seed=0, variant=options.variant).num_parameters(), size.intermediate_size

    vanilla, before = built("vanilla"), built(name)
    parameters, width = built(name, equal_parameters=True)
    assert abs(parameters - vanilla[0]) <= unit / 2
    assert before[0] - parameters == (before[1] - width) * unit
    assert (width < before[1]) == (before[0] - vanilla[0] > unit / 2)


def test_other_options_in_one_folder_are_named(tmp_path, children, unplotted):
    compare(config_for(tmp_path / "out"))
    children.clear()
    other = config_for(tmp_path / "out", steps=77, model=ModelConfig(hidden_size=64))
    with pytest.raises(LabError, match=r"model\.hidden_size: recorded None, given 64; steps: recorded 300, given 77"):
        compare(other)
    with pytest.raises(LabError, match="seed: recorded 0, given 1"):
        compare(config_for(tmp_path / "out", seed=1))
    assert children == []


def test_what_changes_no_number_may_differ(tmp_path, children, unplotted):
    compare(config_for(tmp_path / "out"))
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    children.clear()
    compare(config_for(moved, progress=False, report_to=()))
    assert children == []


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
        ({"variants": ("vanilla", "kvshift")}, r"variants must be one of vanilla, kv-shift, .*, got 'kvshift'"),
        ({"train": TrainConfig(out=Path("x"), model=ModelConfig(variant="smear"))}, r"model\.variant .* is only for"),
        (
            {"train": TrainConfig(out=Path("x"), init_from="llama"), "variants": ("vanilla", "smear")},
            "variants has smear, but with init_from only vanilla and plain shifts are possible",
        ),
        (
            {"train": TrainConfig(out=Path("x"), init_from="llama"), "equal_parameters": True},
            "equal_parameters cannot be combined with init_from",
        ),
        (
            {
                "train": TrainConfig(out=Path("x"), model=ModelConfig(shift_window=3)),
                "variants": ("vanilla", "smear"),
            },
            r"model\.shift_window is 3, but applies to none of the variants vanilla, smear",
        ),
        (
            {
                "train": TrainConfig(out=Path("x"), model=ModelConfig(shift_window=3)),
                "variants": ("k-shift", "kv-shift-gate"),
            },
            r"model\.shift_window is 3, but applies to none of the variants k-shift, kv-shift-gate",
        ),
    ],
)
def test_options_that_cannot_be(tmp_path, children, changes, message):
    config = replace(config_for(tmp_path / "out"), **changes)
    with pytest.raises(LabError, match=message) as failure:
        compare(config)
    assert failure.value.exit_code == 2
    assert children == []
    assert not (tmp_path / "out").exists()


def test_torchrun_would_start_it_several_times(tmp_path, children, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LabError, match="start it without torchrun"):
        compare(config_for(tmp_path / "out"))


def test_a_report_that_cannot_be_written(tmp_path, children, unplotted):
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    with pytest.raises(RunFailedError, match=r"report in .* could not be written: .*the runs are kept") as failure:
        compare(config_for(tmp_path / "out"))
    assert failure.value.exit_code == 3
    (tmp_path / "out" / "report.html").rmdir()
    children.clear()
    compare(config_for(tmp_path / "out"))
    assert children == []


def test_an_interrupt_between_runs_says_how_to_resume(tmp_path, children, monkeypatch):
    def interrupt(folder, label):
        raise KeyboardInterrupt

    monkeypatch.setattr(training_process, "_wait_until_free", interrupt)
    with pytest.raises(TrainingError, match="the same command resumes") as failure:
        compare(config_for(tmp_path / "out"))
    assert failure.value.exit_code == 130


def test_two_comparisons_in_one_folder_refuse(tmp_path, children):
    with RunFolder(tmp_path / "out").locked(), pytest.raises(FolderInUseError):
        compare(config_for(tmp_path / "out"))
    assert children == []


def test_a_run_that_is_not_finished_is_waited_for(tmp_path, children, unplotted, capsys):
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
    assert "an earlier process is still training in" in capsys.readouterr().err
    assert children == ["seed-0/vanilla", "seed-0/kvshift"]
