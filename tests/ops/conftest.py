"""What the tests of the operator share."""

from __future__ import annotations

import pytest
import torch

from kvshift.ops import BACKENDS
from kvshift.ops.cpu_op import cpu_refusal


def skip_unless_built(backend: str) -> None:
    refusal = cpu_refusal(torch.empty(0), 2)
    if backend == "cpu" and refusal is not None:
        pytest.skip(refusal)


@pytest.fixture(params=[backend for backend in BACKENDS if backend != "auto"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each implementation in turn, the reference too: it keeps the same promises."""
    skip_unless_built(request.param)
    return request.param


@pytest.fixture(params=["cpu", "eager"], scope="module")
def fast_backend(request: pytest.FixtureRequest) -> str:
    """Each implementation that is compared with the reference."""
    skip_unless_built(request.param)
    return request.param
