"""Operators that torch.compile and torch.export do not trace into, and that eager calls bypass to save time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kvshift.ops.memory import PLAIN_TENSOR_TYPES, resolve
from kvshift.ops.torch_ops import needs_traceable_ops

Result = TypeVar("Result")


def register_operator(
    name: str,
    *,
    schema: str,
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
    traceable_backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator that registers a function with torch.library, as "kvshift::NAME".

    The decorated function is called directly if all tensors are plain and nothing records operators, because PyTorch
    takes several times as long as a launch to dispatch to an operator written in Python, and decoding waits for it.

    Args:
        name: name of the operator.
        schema: its arguments and results, in the notation of torch.library.
        fake: computes the outputs for tensors without data.
        save, backward: as in `torch.library.register_autograd`. The gradients are not differentiable.
        traceable_backward: computes the same as `backward` in plain operations, for when `needs_traceable_ops` is true.
    """

    def register(launch_in_memory: Callable[..., Result]) -> Callable[..., Result]:
        def launch(*args: Any) -> Result:
            return launch_in_memory(*(resolve(x) if isinstance(x, Tensor) else x for x in args))

        operator = torch.library.custom_op(f"kvshift::{name}", launch, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        differentiable = None
        if backward is not None and traceable_backward is not None:
            operator.register_autograd(backward, setup_context=save)
            alone, traceable = backward, traceable_backward

            def backward_of_either(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
                return (traceable if needs_traceable_ops(*grads) else alone)(ctx, *grads)

            members = {"forward": launch, "setup_context": save, "backward": backward_of_either}
            function = type(name, (torch.autograd.Function,), {n: staticmethod(f) for n, f in members.items()})
            differentiable = cast(Any, function).apply
        overloads = getattr(torch.ops.kvshift, name)

        def call(*args: Any) -> Result:
            if torch.compiler.is_compiling():
                return overloads(*args)
            tensors = [x for x in args if isinstance(x, Tensor)]
            if torch._C._len_torch_dispatch_stack() > 0 or any(type(x) not in PLAIN_TENSOR_TYPES for x in tensors):
                return overloads(*args)
            if differentiable is not None and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                return differentiable(*args)
            return launch(*args)

        return call

    return register
