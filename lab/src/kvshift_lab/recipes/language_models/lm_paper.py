"""The paper's validation losses of Tables 6 to 13 and 15 as printed, read from the files in `recipes/tables/`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path


def _read_losses() -> dict[str, dict[tuple[float, int], float]]:
    """Read all files. A row is a variant at a learning rate, a column a context length; empty means out of memory."""
    found: dict[str, dict[tuple[float, int], float]] = {}
    for path in sorted(Path(__file__).parents[1].glob("tables/tab*.csv")):
        with path.open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                variant, rate = line.pop("variant"), float(line.pop("learning rate"))
                losses = {(rate, int(length)): float(loss) for length, loss in line.items() if loss}
                found.setdefault(variant, {}).update(losses)
    return found


LOSSES: Mapping[str, Mapping[tuple[float, int], float]] = _read_losses()
"""Printed losses by variant, then by (learning rate, context length), without the cells that ran out of memory."""
RATES = tuple(sorted({rate for rate, _ in LOSSES["vanilla"]}))
