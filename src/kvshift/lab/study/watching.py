"""How far the jobs of a sweep are, told while they run in other processes or other threads."""

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

from kvshift.lab.core.messages import say
from kvshift.lab.study.recipe import Job

_APART = 60.0  # seconds between two lines, where stderr is no terminal
_TAIL = 2**16  # bytes at the end of a file of metrics that are looked at


@contextmanager
def watching(jobs: Sequence[tuple[Job, Path]], *, seconds: float | None = None) -> Iterator[set[int]]:
    """While this lasts, tell how many of `jobs` have ended, how far others are, and about how long it still takes.

    Args:
        jobs: with their folders, from whose files all of this is read.
        seconds: between two looks; None: one on a terminal, which has a bar, and else 60.

    Yields:
        The numbers of the jobs that have ended, for the caller to fill in.
    """
    bar: Any = tqdm(
        total=len(jobs), leave=False, disable=None, bar_format="{desc} {bar:20} {elapsed}<{remaining}{postfix}"
    )
    apart = seconds if seconds is not None else _APART if bar.disable else 1.0
    end, start, ended = threading.Event(), time.monotonic(), set[int]()

    def look() -> list[tuple[str, float]]:
        """Of each job what is to be said, if anything, and what share of it is done."""
        found = []
        for number, (job, out) in enumerate(jobs):
            done, total = job.progress(out)
            text = f"{job.arm}, seed {job.seed}: step {done:,} of {total:,}" if done and number not in ended else ""
            found.append((text, 1.0 if number in ended else done / total))
        return found

    first = bar.initial = sum(share for _, share in look())

    def watch() -> None:
        while not end.wait(apart):
            found = look()
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
                say(f"[{text}, {tqdm.format_interval(spent)}{about}] {now}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        end.set()
        thread.join()
        bar.close()


def last_step(metrics: Path) -> int:
    """The step of the last whole line of a metrics.jsonl; 0 where there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):  # cut off, or damaged
            continue
    return 0
