"""Commands that continue earlier work refuse text, tokenizers and models other than those that it began with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub.errors import EntryNotFoundError

from kvshift_lab.commands.compare.command import CompareJob
from kvshift_lab.core.errors import LabError
from kvshift_lab.data import hub
from kvshift_lab.data.config import SHARED_DATA_ENV, DataConfig
from kvshift_lab.data.text import load_text_data
from kvshift_lab.run.inputs import _dataset_commit, identify_inputs, identify_model
from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.run.train_task import TaskTrainConfig, train_task
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.jobs import TextJob, TrainingJob
from kvshift_lab.tasks import MaskedTextConfig

from ..run_cases import assert_same_run, copied, tiny, write_corpus

OTHER_TEXT = r"data\.corpus: recorded content [0-9a-f]{16}, found [0-9a-f]{16}"


def change(path: Path, how: str) -> None:
    """Replace a text by another, of another size or of the same size and modification time."""
    before = path.stat()
    if how == "another file":
        write_corpus(path, seed=7)
        return
    path.write_text(path.read_text().translate(str.maketrans("abcd", "dcba")))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.fixture(autouse=True)
def new_process(cache_of_tests: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Files are read once per process; calling this begins another."""
    from kvshift_lab.data.files import file_digest

    for function in (file_digest, _dataset_commit, hub.model_commit):
        function.cache_clear()
    return file_digest.cache_clear


@pytest.fixture(params=[False, True], ids=["cached", "streamed"])
def stopped(request: pytest.FixtureRequest, tmp_path: Path) -> TrainConfig:
    """A run that was stopped before its last checkpoint."""
    corpus = write_corpus(tmp_path / "text.jsonl")
    validation = str(write_corpus(tmp_path / "validation.jsonl", seed=1))
    config = tiny(corpus, tmp_path / "run", data={"streaming": request.param, "validation": validation}, steps=8)
    train(config)
    (config.out / "result.json").unlink()
    shutil.rmtree(config.out / "checkpoint-8")
    return config


@pytest.mark.parametrize(
    ("field", "how"), [("corpus", "another file"), ("corpus", "same size and time"), ("validation", "another file")]
)
def test_another_text_is_refused(stopped: TrainConfig, field: str, how: str, new_process: Callable[[], None]) -> None:
    change(Path(getattr(stopped.data, field)), how)
    new_process()
    with pytest.raises(LabError, match=rf"data\.{field}: recorded content [0-9a-f]{{16}}, found") as caught:
        train(stopped)
    assert caught.value.exit_code == 2
    assert not (stopped.out / "result.json").exists()


def test_a_run_that_did_not_record_its_text_is_refused(stopped: TrainConfig) -> None:
    path = stopped.out / "config.json"
    config = json.loads(path.read_text())
    del config["data_facts"]["data.corpus"]
    path.write_text(json.dumps(config))
    with pytest.raises(LabError, match=r"older version, which did not record the content of data\.corpus"):
        train(stopped)


def test_the_same_text_written_again_is_the_same(finished: Path, corpus: Path, tmp_path: Path) -> None:
    out = copied(finished, tmp_path)
    before = corpus.stat().st_mtime_ns
    corpus.write_bytes(corpus.read_bytes())
    assert corpus.stat().st_mtime_ns != before
    train(tiny(corpus, out))
    assert_same_run(out, finished)


def test_a_new_run_reads_what_is_there_and_not_the_cache_of_another_text(
    tmp_path: Path, new_process: Callable[[], None]
) -> None:
    path = write_corpus(tmp_path / "text.jsonl")
    config = DataConfig(corpus=str(path), vocab_size=281, sequence_length=37)
    first = load_text_data(config, seed=0, tokenizer_folder=tmp_path / "first")
    change(path, "same size and time")
    new_process()
    second = load_text_data(config, seed=0, tokenizer_folder=tmp_path / "second")
    decoded = [data.tokenizer.decode(data.train[0]["input_ids"]) for data in (first, second)]
    assert decoded[0].translate(str.maketrans("abcd", "dcba")) in path.read_text()
    assert decoded[0] != decoded[1]


def test_order_and_format_of_files_count_and_names_do_not(tmp_path: Path) -> None:
    def digest(**files: str) -> str:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        for name, text in files.items():
            (folder / name.replace("_", ".")).write_text(text)
        return identify_inputs(DataConfig(corpus=str(folder)))["data.corpus"]

    one = digest(a_txt="one", b_txt="two")
    assert digest(c_txt="one", d_txt="two") == one
    assert digest(a_txt="two", b_txt="one") != one
    assert digest(a_md="one", b_txt="two") != one
    assert digest(a_txt="onetwo") != one


def test_another_tokenizer_of_that_name_is_refused(finished: Path, corpus: Path, tmp_path: Path) -> None:
    """The run keeps a copy of the tokenizer, which would silently be used in its place."""
    folder = shutil.copytree(finished / "tokenizer", tmp_path / "mine")
    config = tiny(corpus, tmp_path / "run", data={"tokenizer": str(folder)}, steps=1)
    train(config)
    values = json.loads((folder / "tokenizer.json").read_text())
    values["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(LabError, match=r"data\.tokenizer: recorded content"):
        train(config)


def test_a_tokenizer_in_the_home_folder(
    finished: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a file of options, where no shell expands the tilde."""
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(finished / "tokenizer", tmp_path / "mine")
    at_home, absolute = (DataConfig(corpus=str(corpus), tokenizer=name) for name in ("~/mine", str(tmp_path / "mine")))
    assert identify_inputs(at_home) == identify_inputs(absolute)


def test_compare_refuses_finished_models_of_another_text(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text.jsonl")
    config = tiny(corpus, tmp_path / "run", steps=1)
    train(config)
    job = CompareJob(arm=Arm(variant="kv-shift"), config=config)
    assert job.is_finished(config.out)
    change(corpus, "another file")
    with pytest.raises(LabError, match=OTHER_TEXT):
        job.is_finished(config.out)


def test_reproduce_refuses_runs_and_records_of_another_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_DATA_ENV, str(tmp_path))
    (tmp_path / "texts").mkdir()
    text = write_corpus(tmp_path / "texts" / "text.jsonl")
    config = tiny(Path("texts/text.jsonl"), Path(), steps=1)
    job, out = TextJob(arm=Arm(variant="kv-shift"), config=config), tmp_path / "run"
    job.run(out)
    options = job.record(out)["options"]
    assert job.is_finished(out)
    assert job.other_options(options) == []
    change(text, "another file")
    with pytest.raises(LabError, match=OTHER_TEXT):
        job.is_finished(out)
    assert "data.corpus: recorded content" in "".join(job.other_options(options))
    text.unlink()
    assert job.other_options(options) == []  # a record of another machine
    published = {**options, "data_facts": {"tokens": 281}}
    assert job.other_options(published) == []


def test_a_task_on_another_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_DATA_ENV, str(tmp_path))
    (tmp_path / "texts").mkdir()
    text = write_corpus(tmp_path / "texts" / "text.jsonl")
    task = MaskedTextConfig(corpus="texts/text.jsonl", vocab_size=281, length=32, validation_rows=8)
    config = TaskTrainConfig(task=task, steps=1, batch_size=2, eval_rows=None, device="cpu")
    job, out = TrainingJob(arm=Arm(variant="kv-shift"), config=config), tmp_path / "run"
    job.run(out)
    assert job.is_finished(out)
    change(text, "another file")
    with pytest.raises(LabError, match=OTHER_TEXT):
        job.is_finished(out)
    with pytest.raises(LabError, match=OTHER_TEXT):
        train_task(replace(config, out=out))


def test_weights_configuration_and_tokenizer_identify_a_model(finished: Path, tmp_path: Path) -> None:
    """Its place, times and other files do not."""
    folder = shutil.copytree(finished / "model", tmp_path / "model")
    before = identify_model(str(folder), str(folder))
    assert identify_model(str(finished / "model"), str(finished / "model")) == before
    (folder / "README.md").write_text("notes")
    (folder / "report.json").write_text("{}")
    assert identify_model(str(folder), str(folder)) == before
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        path, content = folder / name, (folder / name).read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert identify_model(str(folder), str(folder)) != before, name
        path.write_bytes(content)


def test_the_commit_identifies_what_is_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, file: str) -> str:
        asked.append(file)
        if file == "config.json":
            raise EntryNotFoundError("404")
        return f"/cache/models--{name}/snapshots/c0ffee/{file}"

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, config: SimpleNamespace(hash=f"{name} {config}"))
    found = identify_inputs(DataConfig(corpus="owner/name", hub_config="10BT", tokenizer="owner/tokens"))
    assert found == {"data.corpus": "owner/name 10BT", "data.tokenizer": "c0ffee"}
    assert asked == ["config.json", "tokenizer_config.json"]


def test_what_cannot_be_identified_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    with pytest.raises(LabError, match="the commit of owner/model on the hub cannot be found: no network"):
        identify_model("owner/model", "owner/model")
    with pytest.raises(LabError, match="finding it on the hub failed: no network"):
        identify_inputs(DataConfig(corpus="owner/name"))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: SimpleNamespace(hash=None))
    with pytest.raises(LabError, match="the hub names no commit for 'owner/name'"):
        identify_inputs(DataConfig(corpus="owner/name"))
