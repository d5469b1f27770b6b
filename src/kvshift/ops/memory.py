"""Which tensors a kernel may read by their address: those whose memory holds their numbers.

Everything that takes `data_ptr()` of a tensor, or passes it to something that does, asks here first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLAIN_TENSOR_TYPES: tuple[type, ...] = (Tensor, torch.nn.Parameter)

_PYTHON: Any = torch._C._parse_dispatch_key("Python")


def unreadable_reason(
    x: Tensor, device: torch.device, dtype: torch.dtype | None = None, types: tuple[type, ...] = PLAIN_TENSOR_TYPES
) -> str | None:
    """Return why a kernel cannot read x at its address; None if it can, after `resolve`.

    Args:
        device: where the kernel runs.
        dtype: what the kernel reads; None if the caller has checked the dtype or the kernel is told.
        types: the types that are not refused. Subclasses may be wrappers, whose own memory holds nothing.
    """
    if type(x) not in types:
        return f"it takes plain tensors, got a {type(x).__name__}"
    if x.layout is not torch.strided:
        return f"it takes dense tensors, got one of layout {x.layout}"
    if x.device != device:
        return f"it takes tensors on {device}, got one on {x.device}"
    if dtype is not None and x.dtype is not dtype:
        return f"it takes tensors of one dtype, {dtype} here, got one of {x.dtype}"
    return None


def forbids_in_place(x: Tensor | None) -> bool:
    """Return True if operations in place are wrong on results of x, or with x on others.

    A wrapper, which computes PyTorch's operations itself (`__torch_dispatch__`), may run one once for each tensor that
    it holds, and the result in a plain tensor would be none. The results of a zero tensor of autograd are immutable.
    """
    return x is not None and (torch._C._dispatch_keys(x).has(_PYTHON) or x._is_zerotensor())


def is_lazy(x: Tensor) -> bool:
    """Return True if the numbers of x differ from those in its memory.

    The memory of a negative view, such as the imaginary part of a conjugate, holds the opposite sign, and a zero tensor
    of autograd has no memory. (Conjugation itself is only of complex tensors, which no kernel takes.)
    """
    return x.is_neg() or x._is_zerotensor()


def resolve(x: Any) -> Any:
    """Return x with its numbers in memory: a copy if it is a tensor that `is_lazy`, and otherwise x itself."""
    return x.clone() if isinstance(x, Tensor) and is_lazy(x) else x
