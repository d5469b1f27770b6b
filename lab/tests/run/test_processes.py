"""Two processes learn the same as one from the same sequences per step."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvshift_lab.core.errors import LabError
from kvshift_lab.run.lifecycle import require_same_sharding
from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import TrainConfig

from ..run_cases import LENGTH, losses, metrics, result, tiny, weights

ROOT = Path(__file__).parents[3]
# Sums over sequences are taken in another order.
CLOSE = {"rtol": 0, "atol": 1e-5}


def in_two(
    *arguments: str, program: str = "kvshift_lab", processes: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `kvshift train` with these arguments by torchrun over gloo."""
    command = [*launch("--standalone", "--nproc-per-node", str(processes), program=program), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


def launch(*options: str, program: str = "kvshift_lab") -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", *program.split(), "train"]


def on_two_machines(*arguments: str) -> list[str]:
    """Return the output of two launchers with one process each, which meet at a loopback address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch(*where), *arguments]
    machines = [subprocess.Popen(command, env=environment, cwd=ROOT, **pipe) for _ in range(2)]
    try:
        said = [machine.communicate(timeout=300)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(said)
    return said


def arguments(corpus: Path, out: Path) -> list[str]:
    """Return the options of `tiny` as command-line arguments."""
    options = f"--out {out} --data.corpus {corpus} --data.vocab-size 281 --data.sequence-length {LENGTH} "
    options += "--data.packing documents --model.hidden-size 24 --model.num-attention-heads 2 --steps 12 "
    options += f"--batch-size 2 --tokens-per-step {8 * LENGTH} --eval-rows 11 --eval-every 5 --save-every 4 "
    return (options + "--log-every 1 --device cpu --report-to").split()


def in_one(corpus: Path, out: Path) -> TrainConfig:
    """Return options with which one process trains the same as two with `arguments`."""
    return tiny(corpus, out, batch_size=2, tokens_per_step=8 * LENGTH, data={"packing": "documents"})


def assert_close_results(two: Path, one: Path, **tolerance: float) -> None:
    """Assert that the losses of two runs are close, and that the other results are equal."""
    torch.testing.assert_close(losses(two), losses(one), **tolerance)
    results = [result(one), result(two)]
    for name in ("train_loss", "eval_loss", "eval_loss_stderr", "eval_losses_per_row"):
        torch.testing.assert_close(*(values.pop(name) for values in results), **tolerance)
    assert results[0].pop("eval_perplexity") == pytest.approx(results[1].pop("eval_perplexity"), rel=1e-5)
    assert results[0] == results[1]  # steps, tokens, sequences, parameters, options


@pytest.mark.slow
def test_two_processes_learn_as_one(corpus, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(in_one(corpus, one))
    done = in_two(*arguments(corpus, two))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kvshift train: finished") == 1, done.stderr

    assert_close_results(two, one, **CLOSE)
    lines = [[(line["kind"], line["step"]) for line in metrics(out)] for out in (one, two)]
    assert lines[0] == lines[1]
    evals = [[line["loss"] for line in metrics(out, "eval")] for out in (one, two)]
    torch.testing.assert_close(evals[1], evals[0], **CLOSE)
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-3)


@pytest.mark.slow
def test_two_machines_learn_as_one_and_one_goes_on(corpus, tmp_path):
    """One process prints and writes. Afterwards, one process takes the last steps from their common checkpoint."""
    one, two = tmp_path / "one", tmp_path / "two"
    train(in_one(corpus, one))
    said = on_two_machines(*arguments(corpus, two))
    assert sorted(each.count("kvshift train: finished") for each in said) == [0, 1], said
    torch.testing.assert_close(losses(two), losses(one), **CLOSE)

    (two / "result.json").unlink()
    shutil.rmtree(two / "checkpoint-12")
    train(in_one(corpus, two))
    torch.testing.assert_close(losses(two), losses(one), **CLOSE)
    assert [line["step"] for line in metrics(two, "train")] == list(range(1, 13))
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_probe_as_one(corpus, tmp_path, sharded):
    """The rows are long enough for all kinds of targets, and two processes cannot share them evenly."""
    one, two = tmp_path / "one", tmp_path / "two"
    config = tiny(corpus, one, batch_size=2, tokens_per_step=8 * 97, eval_rows=7, probes="induction")
    train(replace(config, data=replace(config.data, sequence_length=97, packing="documents")))
    more = f"--data.sequence-length 97 --tokens-per-step {8 * 97} --eval-rows 7 --probes induction".split()
    how = {"program": "lab.tests.run.on_cpu fsdp", **fsdp_variables()} if sharded else {}
    done = in_two(*arguments(corpus, two), *more, **how)
    assert done.returncode == 0, done.stderr
    ours, theirs = metrics(one, "probes"), metrics(two, "probes")
    assert [line["step"] for line in theirs] == [5, 10, 12]
    for line, other in zip(ours, theirs, strict=True):
        assert line.keys() == other.keys() >= {"loss_pair_seen", "loss_token_seen", "loss_neither"}
        heads = line.pop("heads"), other.pop("heads")
        assert other == pytest.approx(line, abs=1e-4)
        for head, same in zip(*heads, strict=True):
            assert same == pytest.approx(head, abs=1e-4)


def fsdp_variables() -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for the example, without bfloat16."""
    lines = (ROOT / "examples" / "accelerate" / "fsdp2.yaml").read_text().splitlines()
    pairs = [line.strip().partition(": ")[::2] for line in lines if line.startswith("  fsdp_")]
    names = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
    variables = {names.get(name.upper(), name.upper()): value for name, value in pairs}
    return {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "no", **variables}


@pytest.mark.slow
def test_sharded_over_two_processes(corpus, tmp_path):
    """FSDP2, set up as in the example, learns the same and saves a whole model, which one process resumes."""
    one, two = tmp_path / "one", tmp_path / "two"
    train(in_one(corpus, one))
    how: dict[str, Any] = {"program": "lab.tests.run.on_cpu fsdp", **fsdp_variables()}
    for attempt, processes in enumerate((2, 1)):
        done = in_two(*arguments(corpus, two), processes=processes, **how)
        assert done.returncode == 0, done.stderr
        assert "FSDP is ignored" not in done.stderr
        assert ("resuming from checkpoint-8" in done.stderr) == (attempt == 1)
        torch.testing.assert_close(losses(two), losses(one), **CLOSE)
        ours = {name: tensor for name, tensor in weights(one).items() if ".shift." in name}
        for line in metrics(two, "coefficients")[-2:]:
            shift = f"model.layers.{line['layer']}.self_attn.shift."
            torch.testing.assert_close(line["alpha"], ours[f"{shift}alpha"].tolist(), rtol=0, atol=1e-5)
        torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-3)
        assert (two / "checkpoint-12" / "pytorch_model_fsdp_0" / ".metadata").exists()
        (two / "result.json").unlink()
        shutil.rmtree(two / "checkpoint-12")


@pytest.mark.parametrize(("saved", "used"), [(True, False), (False, True), (True, True), (False, False)])
def test_checkpoints_saved_with_fsdp_and_without(tmp_path, saved: bool, used: bool):
    if saved:
        (tmp_path / "pytorch_model_fsdp_0").mkdir()
    trainer: Any = SimpleNamespace(is_fsdp_enabled=used)
    if saved == used:
        require_same_sharding(tmp_path, trainer)
        return
    words = "with FSDP, but this run is without" if saved else "without FSDP, but this run is with"
    with pytest.raises(LabError, match=f"was saved {words} FSDP"):
        require_same_sharding(tmp_path, trainer)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2"),
        ("PARALLELISM_CONFIG_CP_SIZE", "2"),
        ("PARALLELISM_CONFIG_SP_SIZE", "4"),
    ],
)
def test_other_kinds_of_parallelism_are_refused_by_name(corpus, tmp_path, monkeypatch, variable: str, value: str):
    monkeypatch.setenv(variable, value)
    with pytest.raises(LabError, match=f"{variable.lower()} is {value} .*DDP or FSDP alone"):
        train(tiny(corpus, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_fsdp_on_a_cpu_is_said_to_be_ignored(corpus, tmp_path):
    done = in_two(*arguments(corpus, tmp_path / "run"), "--steps", "1", **fsdp_variables())
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kvshift train: FSDP is ignored: accelerate uses it only on GPUs.") == 1, done.stderr


@pytest.mark.slow
def test_an_error_is_said_once(corpus, tmp_path):
    done = in_two(*arguments(corpus.with_name("no-such-file.txt"), tmp_path / "run"))
    assert done.returncode != 0
    assert done.stderr.count("kvshift train: ") == 1
    assert "exitcode  : 2" in done.stderr
