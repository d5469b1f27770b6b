"""Mark the tests of models, except those in check/; `make test-oldest` also runs the slow ones with this mark."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and not item.path.is_relative_to(here / "check"):
            item.add_marker(pytest.mark.models)
