"""Tests of models are marked, but for those of the suite that checks any: `make test-oldest` runs the slow ones too."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before `-m` looks for marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and not item.path.is_relative_to(here / "check"):
            item.add_marker(pytest.mark.models)
