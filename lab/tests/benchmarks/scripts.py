"""Import the programs in benchmarks/ as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "benchmarks"


def script(name: str) -> Any:
    """Return a program, which finds those beside it as if it were run."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
