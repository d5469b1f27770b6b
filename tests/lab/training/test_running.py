"""What goes wrong is said in a line, with an exit code, and what was written before is kept."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from kvshift import cli
from kvshift.lab.core.errors import DivergedError, FolderInUseError, LabError, RunFailedError
from kvshift.lab.runs.checkpoints import find_checkpoint
from kvshift.lab.runs.folder import Metrics, RunFolder
from kvshift.lab.training.callbacks import InterruptedRunError
from kvshift.lab.training.train import train
from kvshift.lab.training.trainer import LanguageModelTrainer
from kvshift.lab.variants.building import build_model

from ..run_cases import LENGTH, assert_same_run, copied, disk_of, metrics, tiny, write_corpus


def test_finished_run_is_left_as_it_is(finished, corpus, capfd):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != ".lock"}
    train(tiny(corpus, finished, report_to=(), keep_checkpoints=1, progress=True))  # none of which changes a number
    assert "finished" in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != ".lock"} == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 11}, "steps: 12 there, 11 here"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"model": {"hidden_size": 26, "num_attention_heads": 2}}, "model.hidden_size: 24 there, 26 here"),
        ({"eval_rows": None}, "eval_rows: 11 there, None here"),
        ({"tokens_per_step": 296}, "tokens_per_step: 148 there, 296 here"),
        (
            {"model": {"hidden_size": 24, "num_attention_heads": 2, "shift_targets": ()}},
            r"model.shift_targets: \['k', 'v'\] there, \[\] here",
        ),
    ],
    ids=["steps", "seed", "width", "eval_rows", "tokens", "targets"],
)
def test_other_options_are_refused_by_name(finished, corpus, tmp_path, change, said):
    out = copied(finished, tmp_path)
    with pytest.raises(LabError, match=said) as caught:
        train(tiny(corpus, out, **change))
    assert caught.value.exit_code == 2
    assert not (out / "result.json").exists()


def test_other_data_options_are_refused_before_the_tokenizer_is_touched(finished, corpus, tmp_path):
    out = copied(finished, tmp_path)
    config = tiny(corpus, out)
    before = (out / "tokenizer" / "tokenizer.json").read_bytes()
    with pytest.raises(LabError, match=r"data.vocab_size: 281 there, 283 here"):
        train(replace(config, data=replace(config.data, vocab_size=283)))
    assert (out / "tokenizer" / "tokenizer.json").read_bytes() == before


def test_model_left_open_is_compared_once_it_is_known(finished, corpus, tmp_path):
    """A field that the second command leaves out, and that its default fills in otherwise than the first."""
    out = tmp_path / "run"
    train(tiny(corpus, out, model={"num_hidden_layers": 3}, steps=1))
    (out / "result.json").unlink()
    with pytest.raises(LabError, match=r"model.num_hidden_layers: 3 there, 2 here"):
        train(tiny(corpus, out, steps=1))


def test_other_text_is_refused(finished, tmp_path):
    text = write_corpus(tmp_path / "text.jsonl")
    config = replace(tiny(text, tmp_path / "run", steps=1))
    train(config)
    (config.out / "result.json").unlink()
    lines = text.read_text().splitlines()
    text.write_text("\n".join(lines[:-9] + lines[:9]))
    with pytest.raises(LabError, match=r"the data are not those|the tokenizer does not fit"):
        train(config)


def test_other_tokenizer_is_refused(finished, corpus, tmp_path):
    """A tokenizer of the user's own, exchanged for another between two starts."""
    mine, out = tmp_path / "mine", tmp_path / "run"
    shutil.copytree(finished / "tokenizer", mine)
    config = tiny(corpus, out, steps=1)
    config = replace(config, data=replace(config.data, tokenizer=str(mine)))
    train(config)
    (out / "result.json").unlink()
    shutil.rmtree(out / "tokenizer")
    another = tiny(corpus, tmp_path / "another", steps=1)
    train(replace(another, data=replace(another.data, vocab_size=293)))
    shutil.rmtree(mine)
    shutil.copytree(another.out / "tokenizer", mine)
    with pytest.raises(LabError, match="tokenizer"):
        train(config)


def test_folder_in_use(corpus, tmp_path, capfd):
    config = tiny(corpus, tmp_path / "run")
    with RunFolder(config.out).locked(), pytest.raises(FolderInUseError, match="in use by another process"):
        train(config)
    with RunFolder(config.out).locked():
        assert cli.main(["train", "--out", str(config.out)]) == 4
    assert "is in use by another process" in capfd.readouterr().err


def test_folder_that_cannot_be_made(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match=r"out: .* cannot be written to"):
        train(tiny(corpus, tmp_path / "file" / "run"))


def test_loss_that_is_not_finite(corpus, tmp_path, capfd):
    """The weights explode after the checkpoint of step 4; nothing is written from then on."""
    config = tiny(corpus, tmp_path / "run", log_every=1)
    wild = replace(config, optimizer=replace(config.optimizer, learning_rate=1e30, clip_norm=0.0, warmup_steps=0))
    wild = replace(wild, save_every=1)
    with pytest.raises(DivergedError, match=r"not finite at step (\d+) .*checkpoint-\d+ is kept") as caught:
        train(wild)
    step = caught.value.step
    assert f"at step {step} " in str(caught.value)
    assert caught.value.exit_code == 3
    assert [line["step"] for line in metrics(wild.out, "train")] == list(range(1, step))
    assert find_checkpoint(wild.out, pytest.fail).name == f"checkpoint-{step - 1}"
    assert not (wild.out / "result.json").exists()
    assert not (wild.out / "model").exists()


def test_start_weights_that_are_not_finite_are_not_blamed_on_the_learning_rate(corpus, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        model = build_model(*args, **kwargs)
        model.get_input_embeddings().weight.data.fill_(float("nan"))
        return model

    monkeypatch.setattr("kvshift.lab.training.train.build_model", broken)
    with pytest.raises(RunFailedError, match=r"not finite at step 1 .*No weight has been updated yet: the cause is"):
        train(tiny(corpus, tmp_path / "run"))


@pytest.mark.parametrize("size", [50_000, 150_000], ids=["weights", "optimizer"])
def test_full_disk(finished, corpus, tmp_path, size):
    """The last checkpoint cannot be written: the one before stays, and once there is room the run resumes from it."""
    out = copied(finished, tmp_path)
    shutil.rmtree(out / "checkpoint-12")
    with disk_of(size), pytest.raises(RunFailedError) as caught:
        train(tiny(corpus, out))
    assert caught.value.exit_code == 3
    said = r"checkpoint-12 could not be written \(\d+ MiB are free in .*\): .*; checkpoint-8 is kept"
    assert re.search(said, str(caught.value), re.DOTALL)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-8"]
    train(tiny(corpus, out))
    assert_same_run(out, finished)


def test_final_model_that_does_not_fit(finished, corpus, tmp_path):
    out = copied(finished, tmp_path)
    with disk_of(50_000), pytest.raises(RunFailedError, match=r"model could not be written: .*checkpoint is kept"):
        train(tiny(corpus, out))
    assert not (out / "result.json").exists()
    train(tiny(corpus, out))
    assert_same_run(out, finished)


def test_line_that_does_not_fit_is_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(Metrics(path, up_to_step=0, say=pytest.fail)) as lines:
        lines.write(kind="train", step=1)
        before = path.read_text()
        with disk_of(len(before) + 7), pytest.raises(RunFailedError, match=r"jsonl could not be written: .*kept"):
            lines.write(kind="train", step=2)
        assert path.read_text() == before
        lines.write(kind="train", step=2)  # there is room again
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]


def test_config_that_does_not_fit(corpus, tmp_path):
    with disk_of(20), pytest.raises(LabError):
        train(tiny(corpus, tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()


def test_validation_loss_that_is_not_finite(corpus, tmp_path, monkeypatch):
    def infinite(logits, labels):
        return torch.full((len(labels),), float("inf")), torch.full((len(labels),), LENGTH - 1)

    monkeypatch.setattr("kvshift.lab.training.trainer.sequence_losses", infinite)
    with pytest.raises(
        DivergedError, match="validation loss is not finite after step 5; checkpoint-4 is kept"
    ) as caught:
        train(tiny(corpus, tmp_path / "run"))
    assert caught.value.step == 5
    assert metrics(tmp_path / "run", "eval") == []


def test_out_of_memory(corpus, tmp_path, monkeypatch):
    def greedy(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 2 PiB")

    monkeypatch.setattr(LanguageModelTrainer, "training_step", greedy)
    with pytest.raises(RunFailedError, match=r"out of memory: tried .* smaller batch_size \(now 4\)") as caught:
        train(tiny(corpus, tmp_path / "run"))
    assert caught.value.exit_code == 3


def test_interrupt_while_data_are_read(corpus, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvshift.lab.training.train.load_text_data", interrupted)
    with pytest.raises(InterruptedRunError, match=r"interrupted; the same command resumes") as caught:
        train(tiny(corpus, tmp_path / "run"))
    assert caught.value.exit_code == 130
    monkeypatch.undo()
    train(tiny(corpus, tmp_path / "run", steps=1))


def test_training_in_a_thread(corpus, tmp_path):
    """Signals cannot be listened to there; the rest can be done."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(train, tiny(corpus, tmp_path / "run", steps=1)).result()
    assert (tmp_path / "run" / "result.json").exists()
