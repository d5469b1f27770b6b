"""Run what needs a GPU in one call of nine minutes: tests and measurements, what is least known first.

    OUT=results/gpu python benchmarks/gpu.py [--only tests,decode,...] [--minutes 9]
    OUT=build/gpu python benchmarks/gpu.py --dry                the same on a machine without a GPU, small

The steps are those of `STEPS`, and with --only also those of `MORE`. With --dry, kernels run in Triton's interpreter or
with a stub of the driver, models are tiny, and no number means anything: it checks that every step starts and ends.

It runs from a bare checkout and needs torch, triton, transformers, matplotlib, filelock, pytest and hypothesis, but no
installed kvshift, no tyro and no network. Each step has its own processes and time limit, so a step that fails or hangs
does not affect the others. Tests are distributed over as many processes as there are cores, because most of their time
goes into compiling kernels; a failure is printed as soon as it occurs. Rows and results are written as they are
measured, so they are kept if a step runs out of time.

$OUT/summary.txt            the short table that is printed last
$OUT/steps.log              output of the steps
$OUT/tests.jsonl            a line for each finished test
$OUT/host.jsonl             host time of small calls
$OUT/tuning.json            launch parameters of the Triton kernels, sorted by time
$OUT/bench-STEP/rows.jsonl, table.md, plot.svg
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (str(ROOT / "src"), str(ROOT / "lab/src"))


@dataclass(frozen=True)
class Step:
    """Processes that run at the same time, with a time limit in seconds.

    Attributes:
        variables: environment variables of each process.
        results: file to which tests write their outcomes.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    limit: int
    variables: tuple[Mapping[str, str], ...] = ({},)
    results: Path | None = None


def program(name: str, *arguments: str) -> tuple[str, ...]:
    """Return a command that runs another program in this folder."""
    return sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments


def sharded_tests(out: Path, limit: int, processes: int, paths: tuple[str, ...] = (), *, dry: bool = False) -> Step:
    """Return a step that runs pytest on the GPU tests, or on `paths`, a share in each process; see `tests/sharding.py`.

    Options are given explicitly because pytest before version 9 does not read them from pyproject.toml. The benchmark
    plugin is disabled because it warns about several processes.
    """
    options = ("-q", "-m", "gpu", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:benchmark")
    found = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("**/test_gpu*.py")]
    found.sort(key=lambda path: ("next_token" not in path, path))
    if dry:
        options, found = (*options, "-k", "launch or written_beyond or without_shift"), found[:1]
    files = paths or tuple(path for path in found if find_spec("vllm") or not path.startswith("tests/vllm/"))
    results = out / "tests.jsonl"
    return Step(
        "tests",
        ((sys.executable, "-m", "pytest", "-p", "tests.sharding", *options, *files),) * processes,
        limit,
        tuple(
            {"KVSHIFT_SHARD": f"{share}/{processes}", "KVSHIFT_SHARD_RESULTS": str(results)}
            | ({"KVSHIFT_TEST_DEVICE": "cpu"} if dry else {})
            for share in range(processes)
        ),
        results,
    )


STEPS = ("tests", "decode", "host", "train", "layer", "memory", "op")
MORE = ("prefill", "tuning", "sweep")


def steps(out: Path, names: tuple[str, ...] = STEPS, *, dry: bool = False) -> list[Step]:
    """Return steps by name; together, `STEPS` take nine minutes at most.

    tests      the tests of the kernels, those of the next token first
    decode     a token of the 2.9B model with 8 layers, 1 and 8 sequences: dynamic and static cache, CUDA graphs
    host       host time of small training calls and of the next token
    train      a compiled training step
    layer      forward and backward of an attention layer
    memory     what a decoder layer keeps for backward
    op         the operator at the second shape of the paper's sizes
    """

    def bench(step: str, name: str, *given: str, rounds: int | None = None, cases: tuple[str, ...] = ()) -> Any:
        """Return the command of a benchmark, whose rows go to a folder of the step."""
        size = ("--preset", "smoke", "--device", "cpu") if dry else ("--preset", "paper", "--device", "cuda")
        count = ("--rounds", str(2 if dry else rounds)) if dry or rounds else ()
        chosen = ("--cases", *cases) if cases and not dry else ()
        return (program(name, *given, *size, *count, *chosen, "--out", str(out / f"bench-{step}")),)

    launches = program("launches", "--out", str(out / "host.jsonl"))
    tuning = program("tilings", "--out", str(out / "tuning.json"), "--seconds", "50")
    found = {
        "tests": sharded_tests(out, 110, processes=min(16, os.cpu_count() or 1), dry=dry),
        "decode": Step("decode", bench("decode", "model", "decode", rounds=8, cases=("2.9B",)), 170),
        "host": Step("host", (launches,), 20),
        "train": Step("train", bench("train", "model", "train", rounds=10, cases=("2.9B", "compiled")), 110),
        "layer": Step("layer", bench("layer", "layer", cases=("forward and backward",)), 40),
        "memory": Step("memory", bench("memory", "memory"), 30),
        "op": Step("op", bench("op", "kv_shift", cases=("(16, 2048, 16, 64)",)), 50),
        "prefill": Step("prefill", bench("prefill", "model", "prefill"), 60),
        "tuning": Step("tuning", (tuning,), 60),
        "sweep": Step("sweep", bench("sweep", "kv_shift", "--sweep"), 30),
    }
    return [found[name] for name in names]


def environment() -> dict[str, str]:
    """Return the environment of a step: kvshift is imported from this checkout, and nothing is downloaded."""
    path = os.pathsep.join(filter(None, (*SOURCES, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def run(step: Step, seconds: float, log: TextIO) -> str:
    """Run a step for at most `seconds` and return its outcome in a few words."""
    log.write(f"\n===== {step.name}\n")
    log.flush()
    if step.results is not None:
        step.results.unlink(missing_ok=True)
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command, variables in zip(step.commands, step.variables, strict=True)
    ]
    end, printed = time.monotonic() + seconds, 0
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.2)
        printed = print_new_failures(step, printed)
    late = [process for process in processes if process.poll() is None]
    for process in late:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    print_new_failures(step, printed)
    codes = {process.returncode for process in processes} - {0, 5}  # pytest exits with 5 if a share has no tests
    what = f"stopped after {seconds:.0f} s" if late else f"exit code {max(codes)}" if codes else "done"
    return what if step.results is None else f"{what}: {count_tests(complete_lines(step.results))}"


def print_new_failures(step: Step, printed: int) -> int:
    """Print the test failures after the first `printed`, and return the number of failures so far."""
    if step.results is None:
        return 0
    failed = [result for result in complete_lines(step.results) if result.get("outcome") == "failed"]
    for result in failed[printed:]:
        print(f"FAILED {result['test']}: {result['problem']}", flush=True)
    return len(failed)


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON lines file; an empty list if there is no file yet."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def count_tests(results: list[dict[str, Any]]) -> str:
    """Return how many tests passed, failed or were skipped, and how many did not run or were killed."""
    ended = {result["test"]: result["outcome"] for result in results if "test" in result}
    counts = {kind: list(ended.values()).count(kind) for kind in ("passed", "failed", "skipped")}
    counts["not run"] = max(0, sum(result.get("collected", 0) for result in results) - len(ended))
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no tests"


def summary(out: Path, said: list[tuple[str, str, float]]) -> str:
    """Return the outcomes of the steps and a summary of the rows."""
    lines = [f"{name:<14} {seconds:6.0f} s  {what}" for name, what, seconds in said]
    sys.path[:0] = SOURCES
    from report import short, write

    for row in complete_lines(out / "host.jsonl"):
        numbers = [f"{row[name]:.1f} us {name}" for name in ("microseconds", "without keeping") if name in row]
        lines.append(f"host: {row['call']}: {row.get('problem') or ', '.join(numbers)}")
    for path in sorted(out.glob("bench*/rows.jsonl")):
        write(path.parent)
        lines += ["", f"{path.parent.name}", short(complete_lines(path))]
    return "\n".join(lines)


def main() -> None:
    """Run the steps one after the other within the time limit, and print the summary last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="steps to run, separated by commas (default: all)")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all steps together (default: 9)")
    parser.add_argument("--dry", action="store_true", help="try the steps without a GPU, small")
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT", "results/gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    names = tuple(arguments.only.split(",")) if arguments.only else STEPS
    if unknown := sorted({*names} - {*STEPS, *MORE}):
        parser.error(f"--only must name some of {', '.join((*STEPS, *MORE))}, got {', '.join(unknown)}")
    chosen = steps(out, names, dry=arguments.dry)
    end = time.monotonic() + 60 * arguments.minutes - 10  # 10 s for the summary
    said: list[tuple[str, str, float]] = []
    with (out / "steps.log").open("a") as log:
        for step in chosen:
            start = time.monotonic()
            seconds = min(step.limit, end - start)
            what = run(step, seconds, log) if seconds > 5 else "no time left"
            said.append((step.name, what, time.monotonic() - start))
            print(f"{step.name}: {what}", flush=True)
    text = summary(out, said)
    (out / "summary.txt").write_text(text + "\n")
    print("\n" + text)


if __name__ == "__main__":
    main()
