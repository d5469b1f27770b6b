"""`kvshift compare` as a command: faults of its input, and a kill after which it resumes."""

import json
import os
import subprocess
import sys
import time

import pytest


def kvshift(*arguments):
    return [sys.executable, "-m", "kvshift_lab", *map(str, arguments)]


@pytest.fixture
def child_environment(tmp_path):
    """The environment of real runs: one thread, no network, and a separate cache."""
    cache = str(tmp_path / "cache")
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache}


TINY = (
    *("--steps", 6, "--eval-every", 3, "--save-every", 3, "--batch-size", 2, "--eval-rows", 5, "--report-to"),
    *("--data.sequence-length", 17, "--data.vocab-size", 300),
    *("--model.hidden-size", 12, "--model.num-attention-heads", 3, "--model.intermediate-size", 19),
)


@pytest.mark.slow
def test_a_fault_of_the_input_reaches_the_user(tmp_path, child_environment):
    out, text = tmp_path / "out", tmp_path / "short.txt"
    text.write_text("to be")
    command = kvshift("compare", "--out", out, *TINY, "--data.corpus", text)
    run = subprocess.run(command, env=child_environment, capture_output=True, text=True)
    assert run.returncode == 3
    assert "kvshift compare: 2 of 2 runs failed" in run.stderr
    assert [line.startswith("  ") and "short.txt" in line for line in run.stderr.splitlines()[-2:]] == [True, True]
    assert "Traceback" not in run.stderr
    assert not (out / "compare.json").exists()  # other options may follow


@pytest.mark.slow
def test_killed_outright_and_given_again_it_resumes(tmp_path, child_environment):
    """With frozen identity coefficients both runs train the same model, so all their numbers are equal."""
    out, corpus = tmp_path / "out", tmp_path / "numbers.txt"
    corpus.write_text("".join(f"{number * number} is the square of {number}.\n" for number in range(300)))
    command = kvshift(
        *("compare", "--out", out, *TINY, "--data.corpus", corpus, "--model.shift-init", "identity"),
        *("--model.freeze-shift", "--step-time-seconds", 0.1, "--sample-tokens", 11, "--prompt", "To be"),
    )
    vanilla, shifted = (out / "seed-0" / side for side in ("vanilla", "kvshift"))
    with subprocess.Popen(command, env=child_environment, stderr=subprocess.DEVNULL) as killed:
        deadline = time.monotonic() + 300
        while not (shifted / ".lock").exists():
            assert killed.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        killed.kill()
    finished = (vanilla / "result.json").stat().st_mtime_ns

    run = subprocess.run(command, env=child_environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (vanilla / "result.json").stat().st_mtime_ns == finished
    results = [json.loads((folder / "result.json").read_text()) for folder in (vanilla, shifted)]
    assert results[0]["eval_losses_per_row"] == results[1]["eval_losses_per_row"]
    assert results[1]["parameters"] - results[0]["parameters"] == results[1]["shift_parameters"] == 24
    assert "KV-shift minus vanilla is +0.0000 in this one pair of runs" in run.stdout
    samples = json.loads((out / "samples.json").read_text())
    assert samples["prompt"] == "To be"
    assert samples["texts"]["vanilla"] == samples["texts"]["KV-shift"] != ""
    step_time = json.loads((out / "step_time.json").read_text())
    ratio = step_time["ratios"]["kv-shift"]
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    assert step_time["batch_rows"] == 2
