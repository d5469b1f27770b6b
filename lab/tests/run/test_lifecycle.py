"""An error is reported in one line, with an exit code, and what was written before is kept."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kvshift_lab.core.errors import DivergedError, FolderInUseError, InterruptedRunError, LabError, RunFailedError
from kvshift_lab.run.checkpoints import find_checkpoint
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.run.train import train
from kvshift_lab.run.trainer import LanguageModelTrainer
from kvshift_lab.variants.building import build_model

from ..run_cases import LENGTH, assert_same_run, copied, disk_of, metrics, tiny


def test_finished_run_is_left_as_it_is(finished, corpus, capfd):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != ".lock"}
    train(tiny(corpus, finished, report_to=(), keep_checkpoints=1, progress=True))  # none of these changes a number
    assert "finished" in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != ".lock"} == before


def test_folder_in_use(corpus, tmp_path):
    config = tiny(corpus, tmp_path / "run")
    with RunFolder(config.out).locked(), pytest.raises(FolderInUseError, match="in use by another process") as caught:
        train(config)
    assert caught.value.exit_code == 4


def test_folder_that_cannot_be_made(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match=r"out: .* cannot be written to"):
        train(tiny(corpus, tmp_path / "file" / "run"))


def test_loss_that_is_not_finite(corpus, tmp_path, capfd):
    """The weights explode; the last checkpoint before that is kept, and nothing is written afterwards."""
    config = tiny(corpus, tmp_path / "run", log_every=1)
    wild = replace(config, optimizer=replace(config.optimizer, learning_rate=1e30, clip_norm=0.0, warmup_steps=0))
    wild = replace(wild, save_every=1)
    with pytest.raises(DivergedError, match=r"not finite at step (\d+) .*checkpoint-\d+ is kept") as caught:
        train(wild)
    step = caught.value.step
    assert f"at step {step} " in str(caught.value)
    assert caught.value.exit_code == 3
    assert [line["step"] for line in metrics(wild.out, "train")] == list(range(1, step))
    assert find_checkpoint(wild.out).name == f"checkpoint-{step - 1}"
    assert not (wild.out / "result.json").exists()
    assert not (wild.out / "model").exists()


def test_start_weights_that_are_not_finite_are_not_blamed_on_the_learning_rate(corpus, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        model = build_model(*args, **kwargs)
        model.get_input_embeddings().weight.data.fill_(float("nan"))
        return model

    monkeypatch.setattr("kvshift_lab.run.train.build_model", broken)
    with pytest.raises(RunFailedError, match=r"not finite at step 1 .*No weight has been updated yet: the cause is"):
        train(tiny(corpus, tmp_path / "run"))


@pytest.mark.parametrize(
    ("left", "size", "said"),
    [
        (("result.json", "checkpoint-12"), 50_000, r"checkpoint-12 could not be written \(.*checkpoint-8 is kept"),
        (("result.json", "checkpoint-12"), 150_000, r"checkpoint-12 could not be written \(.*checkpoint-8 is kept"),
        (("result.json", "checkpoint-12"), "metrics", "writing failed: "),
        (("result.json", "model"), 50_000, r"model could not be written: .*checkpoint is kept"),
    ],
    ids=["weights", "optimizer", "metrics", "final model"],
)
def test_full_disk(finished, corpus, tmp_path, left, size, said):
    """What was written before is kept, and once there is room the run resumes from it."""
    out = copied(finished, tmp_path, without=left)
    kept = {path.name for path in out.glob("checkpoint-*")}
    size = (out / "metrics.jsonl").stat().st_size - 7 if size == "metrics" else size
    with disk_of(size), pytest.raises(RunFailedError, match=f"(?s){said}") as caught:
        train(tiny(corpus, out))
    assert caught.value.exit_code == 3
    assert {path.name for path in out.glob("checkpoint-*")} == kept
    assert not (out / "result.json").exists()
    train(tiny(corpus, out))
    assert_same_run(out, finished)


def test_validation_loss_that_is_not_finite(corpus, tmp_path, monkeypatch):
    def infinite(logits, labels):
        return torch.full((len(labels),), float("inf")), torch.full((len(labels),), LENGTH - 1)

    monkeypatch.setattr("kvshift_lab.run.trainer.sequence_losses", infinite)
    with pytest.raises(DivergedError, match="loss is not finite after step 5; checkpoint-4 is kept") as caught:
        train(tiny(corpus, tmp_path / "run"))
    assert caught.value.step == 5
    assert metrics(tmp_path / "run", "eval") == []


CPU_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 PiB")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried to allocate 2 PiB"), CPU_MEMORY], ids=["GPU", "CPU"])
def test_out_of_memory(error, corpus, tmp_path, monkeypatch):
    def greedy(*args, **kwargs):
        raise error

    monkeypatch.setattr(LanguageModelTrainer, "training_step", greedy)
    with pytest.raises(RunFailedError, match=r"out of memory: .*tried .* smaller batch_size \(now 4\)") as caught:
        train(tiny(corpus, tmp_path / "run"))
    assert caught.value.exit_code == 3


def test_interrupt_while_data_are_read(corpus, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvshift_lab.run.resolve.load_text_data", interrupted)
    with pytest.raises(InterruptedRunError, match=r"interrupted; the same command resumes") as caught:
        train(tiny(corpus, tmp_path / "run"))
    assert caught.value.exit_code == 130
    monkeypatch.undo()
    train(tiny(corpus, tmp_path / "run", steps=1))


def test_training_in_a_thread(corpus, tmp_path):
    """Signals cannot be handled in a thread; everything else works."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(train, tiny(corpus, tmp_path / "run", steps=1)).result()
    assert (tmp_path / "run" / "result.json").exists()


def test_tensorboard_leaves_nothing_outside_its_folder(finished, corpus, tmp_path):
    """If a run was killed after its last checkpoint, its final evaluation comes after the event files were closed."""
    out = copied(finished, tmp_path)
    train(tiny(corpus, out, report_to=("tensorboard",)))
    assert not (out / "runs").exists()
    assert (out / "tensorboard").is_dir()


WANDB = """
from unittest.mock import MagicMock
run, config, logged = None, MagicMock(), []
def init(**options):
    global run
    run = MagicMock()
def log(values, **options):
    logged.append(values)
def finish():
    global run
    run = None
def __getattr__(name):
    return MagicMock()
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A stand-in for the parts of wandb that transformers uses."""
    package = tmp_path / "packages" / "wandb"
    (package / "sdk" / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text(WANDB)
    (package / "sdk" / "lib" / "config_util.py").write_text("class ConfigError(Exception): pass")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield importlib.import_module("wandb")
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        del sys.modules[name]


def test_a_run_of_wandb_ends_with_the_training_unless_it_was_there_before(finished, corpus, tmp_path, wandb):
    """Otherwise, a second training in a process would log into the first run."""
    train(tiny(corpus, tmp_path / "one", report_to=("wandb",)))
    assert wandb.logged
    assert wandb.run is None
    assert_same_run(tmp_path / "one", finished)
    wandb.init()
    mine = wandb.run
    train(tiny(corpus, tmp_path / "another", report_to=("wandb",), steps=1))
    assert wandb.run is mine


def test_tokenizer_beside_the_model_that_does_not_fit(finished, corpus, tmp_path, monkeypatch):
    out = copied(finished, tmp_path)

    def full(*args, **kwargs):
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    with pytest.raises(RunFailedError, match=r"model could not be written: No space left on device"):
        train(tiny(corpus, out))
    monkeypatch.undo()
    train(tiny(corpus, out))
    assert_same_run(out, finished)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_event_files_that_do_not_fit(finished, corpus, tmp_path, monkeypatch):
    """TensorBoard writes in its own thread, whose error appears at the next line or at the end."""
    out = copied(finished, tmp_path, without=("result.json", "checkpoint-12"))
    from tensorboard.summary.writer.record_writer import RecordWriter

    written, write = [0], RecordWriter.write

    def full(self, data):
        written[0] += len(data)
        if written[0] > 400:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(RunFailedError, match=r"writing failed: .*No space left on device.* MiB are free in") as caught:
        train(tiny(corpus, out, report_to=("tensorboard",)))
    assert caught.value.exit_code == 3
    assert find_checkpoint(out) is not None
    monkeypatch.undo()
    train(tiny(corpus, out, report_to=("tensorboard",)))
    assert_same_run(out, finished)
