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
from kvshift_lab.run.folder import Metrics, read_metrics
from kvshift_lab.run.train import train

from ..run_cases import assert_same_run, copied, disk_of, tiny


def test_a_run_killed_before_it_had_begun_begins_again(finished, corpus, tmp_path):
    """A folder with environment.json but without config.json is not mistaken for something else."""
    out = tmp_path / "run"
    out.mkdir()
    shutil.copytree(finished / "tokenizer", out / "tokenizer")
    shutil.copy(finished / "environment.json", out)
    (out / ".config.json.part").write_text('{"st')
    train(tiny(corpus, out))
    assert_same_run(out, finished)
    assert "continued" not in json.loads((out / "environment.json").read_text())
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == [".lock"]


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
        ("config.json", '{"model_type": "llama"}', r"config\.json does not belong to a run"),
        ("config.json", "{", r"config\.json: cannot be read"),
        ("config.json", "[]", r"config\.json: must contain a JSON object, got list"),
    ],
    ids=str,
)
def test_a_folder_of_something_else_is_left_as_it_was(corpus, tmp_path, name, content, said):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(LabError, match=said) as caught:
        train(tiny(corpus, tmp_path))
    assert caught.value.exit_code == 2
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {tmp_path / name, tmp_path / ".lock"}
    assert (tmp_path / name).read_text() == content


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


def test_tokenizer_that_does_not_fit(finished, corpus, tmp_path):
    with disk_of(200), pytest.raises(LabError, match=r"cannot save the tokenizer in .*tokenizer") as caught:
        train(tiny(corpus, tmp_path / "run"))
    assert caught.value.exit_code == 3
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


@pytest.mark.parametrize("end", [b'{"kind": "eval", "st', b'\0\0\0\n{"kind": "eval", "step": 3}\n'])
def test_lines_after_the_checkpoint_are_dropped(tmp_path, end):
    """After a power failure, blocks of zeros may follow the lines that were synced with the checkpoint."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "eval", "step": 1}\n{"kind": "eval", "step": 2}\n{"kind": "eval", "step": 3}\n' + end)
    assert [record["step"] for record in read_metrics(path, "eval")] == [1, 2, 3]
    with closing(Metrics(path, up_to_step=2)) as lines:
        lines.write(kind="eval", step=4)
    assert path.read_text() == "".join(f'{{"kind": "eval", "step": {step}}}\n' for step in (1, 2, 4))
