"""Run the kernels on a CUDA device in tests whose tensors are on the CPU.

The arguments that a test passes to `kv_shift` are copied to the device with their strides, and the results are copied
back; so are gradients. KVSHIFT_TEST_DEVICE=cpu runs such tests in Triton's interpreter, as far as it supports them.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from kvshift.ops import shift
from kvshift.ops.arguments import Call

from .cases import Case
from .fused_cases import FusedCase

AnyCase = TypeVar("AnyCase", Case, FusedCase)

DEVICE = torch.device(os.environ.get("KVSHIFT_TEST_DEVICE", "cuda"))

# Warnings of drivers and compilers on untried devices are not errors in these tests.
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="Triton's interpreter has nothing of the kind")


class _Carried(torch.autograd.Function):
    """Copy x to another device; its gradient is copied back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        ctx.home = x.device
        return carry(x, device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return carry(gradients[0], ctx.home), None


def carry(x: Tensor, device: torch.device) -> Tensor:
    """Copy x and the storage before it, such that the copy has the strides and the storage offset of x."""
    if x.numel() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    end = x.storage_offset() + 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    memory = x.as_strided((end,), (1,), 0).to(device, copy=True)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def there(case: AnyCase, device: torch.device = DEVICE) -> AnyCase:
    """Return the same call with its tensors on the device."""
    moved: dict[str, Any] = {name: None if x is None else x.to(device) for name, x in case.where().items()}
    return replace(case.map(lambda x: carry(x, device)), **moved)


@contextmanager
def kernels_on_device() -> Iterator[None]:
    """Run calls with backend "triton" on DEVICE, wherever their tensors are."""
    shift_here = shift._shift

    def there(x: Any) -> Any:
        return _Carried.apply(x, DEVICE) if isinstance(x, Tensor) else x

    def shift_there(call: Call, key: Hashable | None = None) -> Any:
        if call.backend != "triton":
            return shift_here(call, key)
        carried = Call(*map(there, call))
        k, v, *rows = shift_here(carried, shift.launch_key(carried))
        k = call.k if call.alpha is None else _Carried.apply(k, call.k.device)
        v = call.v if call.beta is None else _Carried.apply(v, call.k.device)
        return k, v, *(None if x is None else _Carried.apply(x, call.k.device) for x in rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shift, "_shift", shift_there)
        yield
