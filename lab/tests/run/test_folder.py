"""The folder of a run: what may be in it, what a killed process leaves there, and what a full disk does."""

import errno
import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvshift_lab.core.atomic import write_bytes
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.run.folder import Metrics, RunFolder, read_metrics
from kvshift_lab.run.train import train
from kvshift_lab.variants.model_config import ModelConfig

from ..run_cases import assert_same_run, copied, disk_of, metrics, tiny


def test_a_run_killed_before_it_had_begun_begins_again(finished, corpus, tmp_path):
    """A folder with environment.json but without config.json is not mistaken for something else."""
    out = tmp_path / "run"
    out.mkdir()
    shutil.copytree(finished / "tokenizer", out / "tokenizer")
    shutil.copy(finished / "environment.json", out)
    (out / ".config.json.part").write_text('{"st')
    (out / ".tokenizer-a1b2c3d4").mkdir()
    train(tiny(corpus, out))
    assert_same_run(out, finished)
    assert "continued" not in json.loads((out / "environment.json").read_text())
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == [".lock"]


@pytest.mark.parametrize(
    ("changes", "empty"),
    [({}, True), ({"model": ModelConfig(size="9B")}, False)],
    ids=["no text", "no such size"],
)
def test_options_that_are_refused_leave_no_folder(corpus, tmp_path, changes, empty):
    if empty:
        corpus = tmp_path / "empty.txt"
        corpus.write_text(" \n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LabError) as e:
        train(replace(tiny(corpus, tmp_path / "runs" / "run"), **changes))
    assert e.value.exit_code == 2
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("there", [(), ("tokenizer", "environment.json", ".lock"), ("mine.txt",)], ids=len)
def test_options_that_are_refused_leave_a_folder_of_the_user_as_it_was(there, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    for name in there:
        (out / name).write_text(name)

    def refuse(folder):
        (out / "compare.json").write_text("{}")
        if "tokenizer" not in there:
            folder.tokenizer.mkdir()
            (folder.tokenizer / "tokenizer.json").write_text("{}")
            folder.environment.write_text("{}")
        raise LabError("")

    folder = RunFolder(out)
    with pytest.raises(LabError), folder.locked(out / "compare.json"):
        refuse(folder)
    assert {path.name: path.read_text() for path in out.iterdir()} == {name: name for name in there}


def test_options_that_are_refused_leave_what_was_there(corpus, tmp_path):
    (tmp_path / "run" / "notes").mkdir(parents=True)

    def fail():
        (tmp_path / "new" / "seed-0").mkdir()
        raise LabError("")

    with pytest.raises(LabError), RunFolder(tmp_path / "run").locked():
        raise LabError("")
    with pytest.raises(LabError), RunFolder(tmp_path / "new").locked():
        fail()
    with pytest.raises(RunFailedError), RunFolder(tmp_path / "stopped").locked():
        raise RunFailedError("")
    assert (tmp_path / "run" / "notes").exists()
    assert (tmp_path / "new" / "seed-0").exists()
    assert (tmp_path / "stopped").exists()


def test_a_file_system_that_takes_no_file_is_said_so(tmp_path, monkeypatch):
    """The part that was not written cannot be removed there, either."""

    def refused(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for method in ("open", "unlink"):
        monkeypatch.setattr(Path, method, refused)
    with pytest.raises(RunFailedError, match=r"report\.json could not be written: .*Read-only file system"):
        write_bytes(tmp_path / "report.json", b"{}")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("thesis.tex", "...", r"is not empty and contains no run \(thesis\.tex"),
        ("tokenizer/tokenizer.json", "{}", r"is not empty and contains no run \(tokenizer"),
        ("environment.json", '{"HOME": "/"}', r"environment\.json does not belong to a run"),
        ("config.json", '{"model_type": "llama"}', r"config\.json does not belong to a run"),
        ("config.json", "{", r"config\.json: cannot be read"),
        ("config.json", "[]", r"config\.json: must contain a JSON object, got list"),
        ("environment.json", "3", r"environment\.json: must contain a JSON object, got int"),
    ],
    ids=str,
)
def test_a_folder_of_something_else_is_left_as_it_was(corpus, tmp_path, name, content, said):
    """No lock is left in it, either."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(LabError, match=said) as caught:
        train(tiny(corpus, tmp_path))
    assert caught.value.exit_code == 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == content


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_config_that_holds_something_else(finished, corpus, tmp_path, part):
    out = copied(finished, tmp_path)
    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**values, part: [1]}))
    with pytest.raises(LabError, match=rf"config\.json: {part} must be a JSON object, got list"):
        train(tiny(corpus, out))


@pytest.mark.parametrize("there", [{}, {"attention_bias": False}])
def test_a_run_from_before_an_option_resumes(finished, corpus, tmp_path, there):
    """This includes runs that recorded the model's value, False, in place of the option's, None."""
    out = copied(finished, tmp_path)
    values = json.loads((out / "config.json").read_text())
    assert values["model"].pop("attention_bias") is None
    values["model"] |= there
    (out / "config.json").write_text(json.dumps(values))
    train(tiny(corpus, out))
    assert_same_run(out, finished)
    (out / "result.json").unlink()
    config = tiny(corpus, out)
    with pytest.raises(LabError, match=r"model\.attention_bias: recorded (None|False), given True"):
        train(replace(config, model=replace(config.model, attention_bias=True)))


def test_what_killed_processes_left_is_cleaned(finished, corpus, tmp_path):
    """This includes finished runs."""
    out = copied(finished, tmp_path, without=())
    for name in (".tokenizer-x_y_z_12", ".model.part", ".model.former"):
        (out / name).mkdir()
        (out / name / "file").write_text("")
    (out / ".result.json.part").write_text("{")
    (out / ".metrics.jsonl.part").write_text("{")
    (out / ".notes").write_text("the user's own")
    train(tiny(corpus, out))
    assert sorted(path.name for path in out.glob(".*")) == [".lock", ".notes"]


def test_a_damaged_line_is_named_and_the_others_stay(finished, corpus, tmp_path, capfd):
    """The lines after the damaged one are kept."""
    out = copied(finished, tmp_path, without=("result.json", "checkpoint-12"))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    lines[2] = lines[2][:20] + "\0\0\0" + lines[2][23:]
    (out / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "tra')
    with pytest.raises(LabError, match=r"metrics\.jsonl: line 3 is damaged"):
        read_metrics(out / "metrics.jsonl", "train")
    train(tiny(corpus, out))
    assert "metrics.jsonl: line 3 is damaged" in capfd.readouterr().err
    expected = metrics(finished)
    assert metrics(out) == expected[:2] + expected[3:]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1]", "not a JSON object"),
        ("5", "not a JSON object"),
        ('{"kind": "ev', "not a JSON object"),
        ('{"kind": "eval"}', "no valid step"),
        ('{"kind": 1, "step": "2"}', "no valid kind and step"),
        ('{"kind": "train", "step": 1}', "no valid seconds"),
        ('{"kind": "train", "step": 1, "seconds": null}', "no valid seconds"),
    ],
)
def test_lines_that_are_no_records(tmp_path, line, problem):
    path, said = tmp_path / "metrics.jsonl", []
    path.write_text(f'{{"kind": "eval", "step": 1}}\n{line}\n{{"kind": "eval", "step": 2}}\n')
    text = path.read_text()
    with closing(Metrics(path, up_to_step=2, log=said.append)):
        assert [record["step"] for record in read_metrics(path, "eval")] == [1, 2]
    path.write_text(text)
    assert said == [f"{path}: line 2 is damaged ({problem}); only this line is left out"]
    with pytest.raises(LabError, match=rf"line 2 is damaged \({problem}\); remove or fix it"):
        read_metrics(path, "eval")


def test_lines_beyond_the_checkpoint_go_without_a_word(tmp_path):
    """After a power failure, blocks of zeros may follow what was synced with the checkpoint."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "eval", "step": 1}\n{"kind": "eval", "step": 2}\n\0\0\0\n{"kind": "eval", "step": 3}\n')
    with closing(Metrics(path, up_to_step=2, log=pytest.fail)):
        assert [record["step"] for record in read_metrics(path, "eval")] == [1, 2]


def test_line_that_does_not_fit_is_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(Metrics(path, up_to_step=0, log=pytest.fail)) as lines:
        lines.write(kind="train", step=1)
        before = path.read_text()
        with disk_of(len(before) + 7), pytest.raises(RunFailedError, match=r"jsonl could not be written: .*kept"):
            lines.write(kind="train", step=2)
        assert path.read_text() == before
        lines.write(kind="train", step=2)  # there is room again
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]


def test_tokenizer_that_does_not_fit(finished, corpus, tmp_path):
    with disk_of(200), pytest.raises(LabError, match=r"cannot save the tokenizer in .*tokenizer") as caught:
        train(tiny(corpus, tmp_path / "run"))
    assert caught.value.exit_code == 3
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
