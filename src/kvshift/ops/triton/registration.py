"""Operators that torch.compile and torch.export do not trace into, and that eager calls bypass to save time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kvshift.ops.torch_ops import PLAIN_TENSOR_TYPES, needs_traceable_ops

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
    It returns a tuple or list whose items are None for results that are absent, in whose place the registered operator
    returns empty tensors.

    Args:
        name: name of the operator.
        schema: its arguments and results, in the notation of torch.library.
        fake: computes the outputs for tensors without data.
        save, backward: as in `torch.library.register_autograd`; a gradient that `backward` is given may be None. The
            gradients are not differentiable.
        traceable_backward: computes the same as `backward` in plain operations, for when `needs_traceable_ops` is true.
    """

    def register(launch: Callable[..., Result]) -> Callable[..., Result]:
        def launch_whole(*args: Any) -> Any:
            results, like = launch(*args), next(x for x in args if isinstance(x, Tensor))
            return type(results)(like.new_empty(0) if y is None else y for y in results)

        operator = torch.library.custom_op(f"kvshift::{name}", launch_whole, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        differentiable = None
        if save is not None and backward is not None and traceable_backward is not None:
            alone, traceable = backward, traceable_backward

            def save_for_operator(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                ctx.key = None
                save(ctx, inputs, output)

            operator.register_autograd(backward, setup_context=save_for_operator)

            def launch_and_save(ctx: Any, key: Hashable | None, *args: Any) -> Any:
                results = launch(*args, key=key)
                ctx.key = key
                save(ctx, args, results)
                ctx.set_materialize_grads(False)
                return results

            def backward_of_either(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
                return None, *(traceable if needs_traceable_ops(*grads) else alone)(ctx, *grads)

            # With a `setup_context`, PyTorch inspects the signature in every call.
            members = {"forward": launch_and_save, "backward": backward_of_either}
            function = type(name, (torch.autograd.Function,), {n: staticmethod(f) for n, f in members.items()})
            differentiable = cast(Any, function).apply
        overloads = getattr(torch.ops.kvshift, name)

        def call(*args: Any, key: Hashable | None = None) -> Result:
            if key is None and (
                torch.compiler.is_compiling()
                or torch._C._len_torch_dispatch_stack() > 0
                or any(isinstance(x, Tensor) and type(x) not in PLAIN_TENSOR_TYPES for x in args)
            ):
                return overloads(*args)
            if differentiable is not None and torch.is_grad_enabled():
                for x in args:
                    if isinstance(x, Tensor) and x.requires_grad:
                        return differentiable(key, *args)
            return launch(*args, key=key)

        return call

    return register
