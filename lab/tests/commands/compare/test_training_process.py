"""The processes of `kvshift compare`: signals, errors, kills, and the code that they execute."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import kvshift_lab.commands.compare.training_process as module


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_child_is_told_once_to_end(number):
    """The child counts the signals that it receives, and ends by itself."""
    child = (
        "import os, signal, sys, time\n"
        "seen = []\n"
        "signal.signal(int(sys.argv[1]), lambda *_: seen.append(1))\n"
        "os.kill(os.getppid(), int(sys.argv[1]))\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "sys.exit(40 + len(seen))"
    )
    # The signal may be ignored where the tests run: under nohup, or in the background of a script.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert module._run([sys.executable, "-c", child, str(int(number))]) == 41
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        child = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"
        assert module._run([sys.executable, "-c", child]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_files_of_the_current_directory_are_not_executed(tmp_path, monkeypatch, capfd):
    for name in ("kvshift_lab", "tyro", "torch", "runpy"):
        (tmp_path / f"{name}.py").write_text("import sys; sys.exit('executed')\n")
    monkeypatch.chdir(tmp_path)
    assert module._run([*module._TRAIN, "--help"]) == 0
    assert "--optimizer.learning-rate" in capfd.readouterr().out


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
@pytest.mark.parametrize("there", [False, True], ids=["new folder", "empty folder"])
def test_a_fault_of_the_child_reaches_the_user_and_leaves_nothing(there, tmp_path, child_environment):
    out = tmp_path / "out"
    if there:
        out.mkdir()
    text = tmp_path / "short.txt"
    text.write_text("to be")
    command = kvshift("compare", "--out", out, *TINY, "--data.corpus", text)
    run = subprocess.run(command, env=child_environment, capture_output=True, text=True)
    assert run.returncode == 2
    said = run.stderr.splitlines()
    assert any(line.startswith("kvshift train:") and "short.txt" in line for line in said)
    assert said[-1].startswith("kvshift compare: seed 0, vanilla (1 of 2): training ended with exit code 2")
    assert "Traceback" not in run.stderr
    assert {*tmp_path.iterdir()} - {tmp_path / "cache"} == {text, *[out] * there}
    assert not there or not any(out.iterdir())


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
