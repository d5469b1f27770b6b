"""What the tests of the operator share."""

from __future__ import annotations

import pytest

from kvshift.ops import BACKENDS


@pytest.fixture(params=[backend for backend in BACKENDS if backend != "auto"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each implementation in turn, the reference too: it keeps the same promises."""
    return request.param
