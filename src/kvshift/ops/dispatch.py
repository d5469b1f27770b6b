"""Which implementation takes a call."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

_BATCHED = torch._C._parse_dispatch_key("Batched")  # what `is_grads_batched` hands to backward


def is_watched(*gradients: Tensor) -> bool:
    """Whether somebody follows this call operation by operation, and must be given plain ones (`plain.py`).

    Those who follow are transforms of `torch.func`, modes that see every operation (`make_fx`, fake tensors),
    `torch.jit.trace` and forward-mode AD: what a kernel writes, or an autograd function computes, would be lost to
    them. torch.compile and torch.export follow calls in ways of their own; only a transform within them counts.

    Args:
        gradients: in backward, those that came in: `torch.autograd.grad(is_grads_batched=True)` shows in them alone.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or any(torch._C._dispatch_keys(gradient).has(cast(Any, _BATCHED)) for gradient in gradients)
    )
