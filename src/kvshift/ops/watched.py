"""Whether somebody follows a call operation by operation."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _TorchDispatchModeKey
from torch.autograd import forward_ad

_TRACERS = (_TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL)
PLAIN: tuple[type, ...] = (Tensor, torch.nn.Parameter)
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_BATCHED = torch._C._parse_dispatch_key("Batched")  # what `is_grads_batched` hands to backward


def needs_traceable_ops(*gradients: Tensor, by_compiler: bool = False) -> bool:
    """Whether somebody follows this call operation by operation, and must be given plain ones (`plain.py`).

    Those who follow are transforms of `torch.func`, tracers (`make_fx`, fake tensors, `torch.jit.trace`) and
    forward-mode AD: what a kernel writes, or an autograd function computes, would be lost to them. Modes that only look
    on, and count memory or operations, are shown what runs otherwise. torch.compile and torch.export follow calls in
    ways of their own; only a transform within them counts.

    Args:
        by_compiler: whether those two count as well.
        gradients: in backward, those that came in. Then also counts whether backward is differentiated
            (`create_graph=True`), and whether gradients come in batches (`is_grads_batched=True`).
    """
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_compiling():
        return by_compiler
    return (
        (torch._C._len_torch_dispatch_stack() > 0 and any(map(_is_active, _TRACERS)))
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or (len(gradients) > 0 and (torch.is_grad_enabled() or any(map(_is_batched, gradients))))
    )


def is_exporting() -> bool:
    """Whether torch.export traces. (`torch.compiler.is_exporting` says so of torch.compile too in 2.10 and 2.11.)"""
    return torch.compiler._is_exporting_flag


def _is_active(tracer: _TorchDispatchModeKey) -> bool:
    return torch._C._get_dispatch_mode(tracer) is not None


def _is_batched(gradient: Tensor) -> bool:
    return torch._C._dispatch_keys(gradient).has(cast(Any, _BATCHED))
