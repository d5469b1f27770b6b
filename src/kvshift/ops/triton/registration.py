"""Operators that torch.compile and torch.export do not trace into, and that eager calls bypass to save time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvshift.ops.memory import PLAIN_TENSOR_TYPES, is_lazy, resolve
from kvshift.ops.torch_ops import needs_traceable_ops

Results = tuple[Tensor | None, ...]


class Operator:
    """A function registered with torch.library as "kvshift::NAME".

    The function is called directly if all tensors are plain and nothing records operators, because PyTorch takes
    several times as long as a launch to dispatch to an operator written in Python, and decoding waits for it.

    Args:
        launch: takes the arguments of the schema, and returns None in place of results that are absent, for which the
            registered operator returns empty tensors.
        schema: arguments and results, in the notation of torch.library.
        fake: computes the outputs for tensors without data.
        save, backward: as in `torch.library.register_autograd`; a gradient that `backward` is given may be None. The
            gradients are not differentiable.
        traceable_backward: computes the same as `backward` in plain operations, for when `needs_traceable_ops` is true.

    Attributes:
        launch: the function, for callers that know that all tensors are plain and not lazy, and nothing is recorded.
        differentiable: the same if gradients are recorded; None without a backward. It skips what PyTorch does for
            tensors that `torch.func` wraps or has wrapped.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[..., Results],
        *,
        schema: str,
        fake: Callable[..., Any],
        save: Callable[..., None] | None = None,
        backward: Callable[..., Results] | None = None,
        traceable_backward: Callable[..., Results] | None = None,
    ) -> None:
        def whole(*args: Any) -> Any:
            results, like = launch(*map(resolve, args)), next(x for x in args if isinstance(x, Tensor))
            return type(results)(like.new_empty(0) if y is None else y for y in results)

        operator = torch.library.custom_op(f"kvshift::{name}", whole, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        self.launch = launch
        self.differentiable: Callable[..., Results] | None = None
        self._apply: Callable[..., Results] | None = None
        if save is not None and backward is not None and traceable_backward is not None:
            operator.register_autograd(backward, setup_context=save)
            function = _autograd_function(name, launch, save, backward, traceable_backward)
            self.differentiable = super(torch.autograd.Function, function).apply  # type: ignore[misc]
            self._apply = function.apply
        self._registered = getattr(torch.ops.kvshift, name)

    def __call__(self, *args: Any) -> Results:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            return self._registered(*args)
        records = lazy = False
        for x in args:
            if type(x) in PLAIN_TENSOR_TYPES:
                records = records or x.requires_grad
                lazy = lazy or is_lazy(x)
            elif isinstance(x, Tensor):
                return self._registered(*args)
        if lazy:
            args = tuple(map(resolve, args))
        if records and self._apply is not None and torch.is_grad_enabled():
            return self._apply(*args)
        return self.launch(*args)


def _autograd_function(
    name: str,
    launch: Callable[..., Results],
    save: Callable[..., None],
    backward: Callable[..., Results],
    traceable_backward: Callable[..., Results],
) -> Any:
    """Return `launch` as an autograd function. (With a `setup_context`, PyTorch inspects signatures in every call.)"""

    def launch_and_save(ctx: Any, *args: Any) -> Results:
        results = launch(*args)
        save(ctx, args, results)
        ctx.set_materialize_grads(False)
        return results

    def backward_of_either(ctx: Any, *grads: Tensor | None) -> Results:
        return (traceable_backward if needs_traceable_ops(*grads) else backward)(ctx, *grads)

    members = {"forward": staticmethod(launch_and_save), "backward": staticmethod(backward_of_either)}
    return type(name, (torch.autograd.Function,), members)
