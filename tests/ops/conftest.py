"""Fixtures and skips that the operator's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvshift.ops import BACKENDS
from kvshift.ops.cpu.kernel import cpu_unsupported_reason
from kvshift.ops.triton.call import triton_unsupported_reason


def skip_unless_built(backend: str) -> None:
    refusals = {"cpu": cpu_unsupported_reason, "triton": triton_unsupported_reason}
    refusal = refusals[backend](torch.empty(0), 2) if backend in refusals else None
    if refusal is not None:
        pytest.skip(refusal)


def leave_to_one_dtype(backend: str, dtype: torch.dtype) -> None:
    """Run slow backends with bfloat16 only: where a token finds its predecessor does not depend on the dtype."""
    if backend in ("triton", "reference") and dtype != torch.bfloat16:
        pytest.skip("interpreter and loops are slow, and a GPU compiles for each dtype: bfloat16 stands for all")


@pytest.fixture(params=[backend for backend in BACKENDS if backend != "auto"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each implementation in turn, including the reference: it keeps the same promises."""
    skip_unless_built(request.param)
    return request.param


@pytest.fixture(params=["cpu", "triton", "eager"], scope="module")
def fast_backend(request: pytest.FixtureRequest) -> str:
    """Each implementation that is compared with the reference."""
    skip_unless_built(request.param)
    return request.param


@pytest.fixture
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
