"""Kernels on a CUDA device under tests whose tensors are on the CPU.

What a test hands to `kv_shift` is carried to the device, strides and all, and what comes back is carried home; so are
gradients. KVSHIFT_TEST_DEVICE=cpu runs such tests in Triton's interpreter, as far as they can go there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.ops import shift

DEVICE = torch.device(os.environ.get("KVSHIFT_TEST_DEVICE", "cuda"))

# What drivers and compilers warn of on a device that nobody tried before is not for these tests to judge.
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="Triton's interpreter has nothing of the kind")


class _Carried(torch.autograd.Function):
    """x on another device; its gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        ctx.home = x.device
        return carry(x, device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return carry(gradients[0], ctx.home), None


def carry(x: Tensor, device: torch.device) -> Tensor:
    """A copy with the strides of x, at the same place in a memory that holds what lies around x too."""
    if x.numel() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    end = x.storage_offset() + 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    memory = x.as_strided((end,), (1,), 0).to(device, copy=True)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


@contextmanager
def kernels_on_device() -> Iterator[None]:
    """Calls with backend "triton" run on DEVICE, wherever their tensors are."""
    shift_here = shift._shift

    def there(tensors: Any) -> list[Tensor | None]:
        return [None if x is None else _Carried.apply(x, DEVICE) for x in tensors]

    def shift_there(inputs: Any, coefficients: Any, states: Any, sequences: int, max_rows: int, *others: Any) -> Any:
        *bounds, backend = others
        if backend != "triton":
            return shift_here(inputs, coefficients, states, sequences, max_rows, *bounds, backend)
        home = inputs[0].device
        bounds = [None if x is None else x.to(DEVICE) for x in bounds]
        shifted, rows = shift_here(
            there(inputs), there(coefficients), there(states), sequences, max_rows, *bounds, backend
        )
        outputs = [
            x if own is None else _Carried.apply(y, home)
            for x, own, y in zip(inputs, coefficients, shifted, strict=True)
        ]
        return outputs, [_Carried.apply(x, home) for x in rows]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shift, "_shift", shift_there)
        yield
