"""results/RECIPE/PRESET.jsonl: what is kept of the runs of a recipe, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvshift.lab.analysis.runs import read_lines
from kvshift.lab.errors import LabError
from kvshift.lab.records import write_bytes
from kvshift.recipes.recipe import Record

__all__ = ["read_records", "record_of", "write_records"]

_KEPT = ("started", "commit", "versions", "hardware", "platform")


def record_of(label: str, seed: int, found: dict[str, Any]) -> Record:
    """A record from what `Job.record` gives; of the environment, what belongs to no single machine's paths."""
    environment = {name: found["environment"].get(name) for name in _KEPT}
    if "continued" in found["environment"]:
        environment["continued"] = [
            {name: part.get(name) for name in ("step", *_KEPT)} for part in found["environment"]["continued"]
        ]
    return Record(label=label, seed=seed, **{**found, "environment": environment})


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write all lines anew; the file is whole or as it was."""
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
