"""results/RECIPE/PRESET.jsonl: what is kept of the runs of a recipe, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvshift.lab.analysis.runs import read_lines
from kvshift.lab.errors import LabError
from kvshift.lab.runs.folder import write_bytes
from kvshift.recipes.jobs import RunJob
from kvshift.recipes.recipe import Job, Record

__all__ = ["read_records", "record_of", "write_records"]

_KEPT = ("started", "commit", "versions", "hardware", "platform")


def record_of(job: Job, out: Path) -> Record:
    """What is kept of a finished job; of its environment, what belongs to no single machine's paths."""
    found = job.record(out)
    environment = {name: found["environment"].get(name) for name in _KEPT}
    if "continued" in found["environment"]:
        environment["continued"] = [
            {name: part.get(name) for name in ("step", *_KEPT)} for part in found["environment"]["continued"]
        ]
    tunes = job.tunes if isinstance(job, RunJob) else None
    return Record(label=job.label, seed=job.seed, tunes=tunes, **{**found, "environment": environment})


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write all lines again; the file is whole or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(vars(record), allow_nan=False, ensure_ascii=False) for record in records)
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode())


def read_records(path: Path) -> list[Record]:
    """The records in a file; raises LabError that names file and line."""
    records = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            records.append(Record(**line))
        except TypeError as error:
            raise LabError(f"{path}:{number}: not a record of a recipe: {error}") from error
    return records
