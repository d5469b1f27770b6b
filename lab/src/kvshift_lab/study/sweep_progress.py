"""Progress of the jobs of a sweep, reported while they run in other processes or threads."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from kvshift_lab.core.messages import log
from kvshift_lab.study.recipe import Job

_REPORT_SECONDS = 60.0  # seconds between two lines if stderr is not a terminal
_TAIL = 2**16  # bytes that are read from the end of a file of metrics


@contextmanager
def report_progress(jobs: Sequence[tuple[Job, Path]]) -> Iterator[set[int]]:
    """Report the number of finished jobs, the progress of the others and the estimated time left, inside the block.

    Args:
        jobs: jobs and their folders, from whose files the progress is read.

    Yields:
        The numbers of the jobs that have ended, for the caller to fill in.
    """
    bar: Any = tqdm(
        total=len(jobs), leave=False, disable=None, bar_format="{desc} {bar:20} {elapsed}<{remaining}{postfix}"
    )
    apart = _REPORT_SECONDS if bar.disable else 1.0
    end, start, ended = threading.Event(), time.monotonic(), set[int]()

    def read_progress() -> list[tuple[str, float]]:
        """Return the progress of each job as text, empty if there is none to report, and as a share of its steps."""
        found = []
        for number, (job, out) in enumerate(jobs):
            done, total = job.progress(out)
            text = f"{job.arm}, seed {job.seed}: step {done:,} of {total:,}" if done and number not in ended else ""
            found.append((text, 1.0 if number in ended else done / total))
        return found

    first = bar.initial = sum(share for _, share in read_progress())

    def watch() -> None:
        while not end.wait(apart):
            found = read_progress()
            done = sum(share for _, share in found)
            text, now = f"{len(ended)} of {len(jobs)} runs", "; ".join(text for text, _ in found if text)
            if not bar.disable:
                bar.set_description_str(text, refresh=False)
                bar.set_postfix_str(now, refresh=False)
                bar.n = done
                bar.refresh()
            elif now:
                spent = time.monotonic() - start
                left = spent * (len(jobs) - done) / (done - first) if done > first else None
                about = "" if left is None else f", about {tqdm.format_interval(left)} left"
                log(f"[{text}, {tqdm.format_interval(spent)}{about}] {now}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        end.set()
        thread.join()
        bar.close()


def last_step(metrics: Path) -> int:
    """Return the step of the last complete line of a metrics.jsonl; 0 if there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):  # incomplete or damaged
            continue
    return 0
