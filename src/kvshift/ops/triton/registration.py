"""Operators that torch.compile and torch.export take whole, and that cost no more than a launch where nobody looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kvshift.ops.torch_ops import PLAIN, needs_traceable_ops

Result = TypeVar("Result")


def registered(
    name: str,
    *,
    schema: str,
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
    traceable_backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Register a function with torch.library, as "kvshift::NAME".

    What comes back calls it directly where all tensors are plain and nothing records operators: PyTorch's way to an
    operator written in Python takes several times as long as a launch, and decoding waits for it.

    Args:
        name: of the operator.
        schema: its arguments and results, as torch.library writes them.
        fake: the function's outputs for tensors without data.
        save, backward: of its autograd, as in `torch.library.register_autograd`; its gradients have none themselves.
        traceable_backward: what `backward` does, by plain operations, where `needs_traceable_ops` says that it must.
    """

    def register(launch: Callable[..., Result]) -> Callable[..., Result]:
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
            if torch._C._len_torch_dispatch_stack() > 0 or any(type(x) not in PLAIN for x in tensors):
                return overloads(*args)
            if differentiable is not None and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                return differentiable(*args)
            return launch(*args)

        return call

    return register
