"""Two processes learn what one does with the same rows in a step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvshift.lab.training import train

from .cases import LENGTH, losses, metrics, result, tiny, weights

# Sums over rows are taken in another order.
CLOSE = {"rtol": 0, "atol": 1e-5}


def in_two(*arguments: str, launcher: tuple[str, ...] = ("torch.distributed.run",)) -> subprocess.CompletedProcess[str]:
    """`kvshift train` with these arguments, by torchrun over gloo."""
    port = ["--standalone"] if launcher[0] == "torch.distributed.run" else []
    command = [sys.executable, "-m", *launcher, *port, "--nproc-per-node", "2", "-m", "kvshift", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def arguments(corpus: Path, out: Path) -> list[str]:
    """The options of `tiny`, for the command line."""
    options = {
        "out": out,
        "data.corpus": corpus,
        "data.vocab-size": 281,
        "data.sequence-length": LENGTH,
        "data.packing": "documents",
        "model.hidden-size": 24,
        "model.num-attention-heads": 2,
        "steps": 12,
        "batch-size": 2,
        "tokens-per-step": 8 * LENGTH,
        "eval-rows": 11,
        "eval-every": 5,
        "save-every": 4,
        "log-every": 1,
        "device": "cpu",
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))] + ["--report-to"]


@pytest.mark.slow
def test_two_processes_learn_as_one(corpus, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    same = {"batch_size": 2, "tokens_per_step": 8 * LENGTH, "data": {"packing": "documents"}}
    train(tiny(corpus, one, **same))
    done = in_two(*arguments(corpus, two))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finished") == 1

    torch.testing.assert_close(losses(two), losses(one), **CLOSE)
    for kind in ("train", "eval", "coefficients"):
        ours, theirs = metrics(one, kind), metrics(two, kind)
        assert [line["step"] for line in theirs] == [line["step"] for line in ours]
    evals = [[line["loss"] for line in metrics(out, "eval")] for out in (one, two)]
    torch.testing.assert_close(evals[1], evals[0], **CLOSE)
    results = [result(one), result(two)]
    for name in ("train_loss", "eval_loss", "eval_loss_stderr", "eval_losses_per_row"):
        torch.testing.assert_close(*(values.pop(name) for values in results), **CLOSE)
    assert results[0].pop("eval_perplexity") == pytest.approx(results[1].pop("eval_perplexity"), rel=1e-5)
    assert results[0] == results[1]  # steps, tokens, rows, parameters, options
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=0, atol=1e-3, msg=name)


@pytest.mark.slow
def test_an_error_is_said_once(corpus, tmp_path):
    done = in_two(*arguments(corpus.with_name("no such file.txt"), tmp_path / "run"))
    assert done.returncode != 0
    assert done.stderr.count("kvshift train: ") == 1
    assert "exitcode  : 2" in done.stderr
