"""All that a GPU is needed for, in one call of nine minutes: tests, tuning, measurements.

    OUT=results/gpu python benchmarks/gpu.py [--only tests,tuning,...] [--minutes 9]

It runs from a bare checkout and needs torch, triton, transformers, matplotlib, filelock, pytest and hypothesis: no
installation of kvshift, no tyro, no network. Each step is a process of its own with a time limit of its own: one that
fails or hangs does not cost the rest. The benchmark's rows are written as they are measured, so that a step that ran
out of time has left what it had.

$OUT/summary.txt            the short table that is printed last
$OUT/steps.log              what the steps said
$OUT/tuning.json            launch parameters of the Triton kernels, by time
$OUT/bench/rows.jsonl, table.md, plot.svg, plot.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Step:
    """A process, and the seconds that it may take."""

    name: str
    command: tuple[str, ...]
    limit: int


def bench_code(out: Path, *parts: str, **options: object) -> tuple[str, ...]:
    """A Python that calls the benchmark, without the command line's tyro."""
    given = {"parts": parts, "preset": "paper", "device": "cuda", **options}
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvshift.benchmarks.bench import BenchConfig, bench\n"
        "from kvshift.lab.errors import LabError\n"
        "try:\n"
        f"    bench(BenchConfig(out=Path({str(out)!r}), {arguments}))\n"
        "except LabError as error:\n"
        "    sys.exit(str(error))\n"
    )
    return sys.executable, "-c", code


def test_command() -> tuple[str, ...]:
    """pytest on the tests for a GPU alone; in eight processes where there is pytest-xdist, for most of it is compiling.

    Said aloud is what pytest before version 9 does not read in pyproject.toml; the benchmark plugin warns of processes.
    """
    options = ("-q", "-m", "gpu", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:benchmark")
    workers = ("-n", "8") if importlib.util.find_spec("xdist") else ()
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("**/test_gpu*.py"))
    return (sys.executable, "-m", "pytest", *options, *workers, "--durations=10", *files)


def steps(out: Path) -> list[Step]:
    """What docs/performance.md says must hold on a GPU, the most important first; limits add up to nine minutes."""
    bench = out / "bench"
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests")
    tuning = (sys.executable, "-m", "kvshift.benchmarks.tuning")
    return [
        Step("tests", pytest, 110),
        Step("tuning", (*tuning, "--out", str(out / "tuning.json"), "--seconds", "50"), 60),
        Step("op", bench_code(bench, "op", layers=8), 110),
        Step("train", bench_code(bench, "train", layers=8), 110),
        Step("decode", bench_code(bench, "decode", "prefill", layers=8), 80),
        Step("layer, memory", bench_code(bench, "layer", "memory", layers=8), 40),
        Step("sweep", bench_code(bench, "sweep", layers=8), 30),
    ]


def surroundings() -> dict[str, str]:
    """The environment of a step: kvshift from this checkout, nothing from a network."""
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def run(step: Step, seconds: float, log: TextIO) -> str:
    """Run a step for so many seconds at the most; what came of it, in a word or two."""
    log.write(f"\n===== {step.name}\n")
    log.flush()
    process = subprocess.Popen(
        step.command, cwd=ROOT, env=surroundings(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return f"stopped after {seconds:.0f} s"
    return "done" if code == 0 else f"exit code {code}"


def summary(out: Path, said: list[tuple[str, str, float]]) -> str:
    """What came of the steps, and our rows beside their baselines."""
    lines = [f"{name:<14} {what:<20} {seconds:6.0f} s" for name, what, seconds in said]
    path = out / "bench" / "rows.jsonl"
    if not path.exists():
        return "\n".join(lines)
    sys.path.insert(0, str(SOURCE))
    from kvshift.benchmarks.report import draw, markdown, short
    from kvshift.lab.analysis.curves import save_figure

    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the last, of a step that was stopped
            break
    if not rows:
        return "\n".join(lines)
    (out / "bench" / "table.md").write_text(markdown(rows))
    if (figure := draw(rows)) is not None:
        save_figure(figure, out / "bench" / "plot")
    return "\n".join([*lines, "", short(rows)])


def main() -> None:
    """Run the steps one after the other within the minutes there are, and print the summary last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="steps to run, separated by commas; all by default")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps together (default: 9)")
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT", "results/gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = steps(out)
    if arguments.only:
        names = arguments.only.split(",")
        unknown = set(names) - {step.name.partition(",")[0] for step in chosen}
        if unknown:
            parser.error(f"--only must name steps out of tests, tuning, op, ..., got {', '.join(sorted(unknown))}")
        chosen = [step for step in chosen if step.name.partition(",")[0] in names]
    end = time.monotonic() + 60 * arguments.minutes - 10  # for the summary
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
