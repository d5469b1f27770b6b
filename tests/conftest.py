"""Fixtures of the library's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def keep_all(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that calls another one while recomputation is off, so that backward keeps every tensor."""
    from kvshift.layers import recompute

    def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(recompute, "may_recompute", lambda *modules: False)
            return function(*args, **options)

    return call
