"""What the tests of the operator share."""

from __future__ import annotations

import pytest
import torch

from kvshift.ops import BACKENDS
from kvshift.ops.cpu.kernel import cpu_refusal
from kvshift.ops.triton.call import triton_refusal


def skip_unless_built(backend: str) -> None:
    refusals = {"cpu": cpu_refusal, "triton": triton_refusal}
    refusal = refusals[backend](torch.empty(0), 2) if backend in refusals else None
    if refusal is not None:
        pytest.skip(refusal)


def leave_to_one_dtype(backend: str, dtype: torch.dtype) -> None:
    """Of dtypes, what is slow gets the smallest: where a token finds its predecessor depends on none."""
    if backend in ("triton", "reference") and dtype != torch.bfloat16:
        pytest.skip("interpreter and loops are slow, and a GPU compiles for each dtype: bfloat16 stands for all")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks for marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`slow_on_triton(window=[3])` marks tests of a window of 3 as slow where the Triton kernels take them.

    The interpreter takes a hundred times as long as the other backends; each rule keeps a case there that is not slow.
    """
    for item in items:
        for mark in item.iter_markers("slow_on_triton"):
            given = getattr(item, "callspec", None)
            params = {} if given is None else given.params
            on_triton = "triton" in (params.get("backend"), params.get("fast_backend"))
            if on_triton and any(params[name] in values for name, values in mark.kwargs.items()):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(params=[backend for backend in BACKENDS if backend != "auto"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each implementation in turn, the reference too: it keeps the same promises."""
    skip_unless_built(request.param)
    return request.param


@pytest.fixture(params=["cpu", "triton", "eager"], scope="module")
def fast_backend(request: pytest.FixtureRequest) -> str:
    """Each implementation that is compared with the reference."""
    skip_unless_built(request.param)
    return request.param
