"""Launches that keep the compiled kernel, because finding it takes Triton longer than launching it.

For every launch, Triton's `kernel[grid](...)` looks at each argument to find the compiled kernel that fits all of them:
about 20 us for 40 arguments. What it looks at is fixed here when a launch is made, except for the addresses of the
tensors, of which only one property counts, whether they are multiples of 16. So the compiled kernel can be launched
directly if all of them are, which takes 2 us. Otherwise, or if Triton is not one of the versions that have been tested,
or runs kernels in its interpreter, it is asked as usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_TESTED = ((3, 4), (3, 9))
"""The oldest and the newest version of Triton whose compiled kernels were launched in tests."""
_MOST_KEPT = 4096
_ALIGNMENT = 16  # of addresses, in bytes, for which Triton compiles

Value = TypeVar("Value")


class CompiledLaunch:
    """A launch of a kernel with fixed numbers, for tensors that differ only in their addresses.

    Args:
        kernel: a function decorated with `triton.jit`. Its parameters are tensors first, then numbers, then constants.
        grid: number of programs along each axis.
        numbers: arguments after the tensors and the numbers of a call.
        constants: compile-time constants in the order of the parameters, then options such as `num_warps`.
        device: index of the CUDA device of the tensors; -1 for tensors elsewhere.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[int, ...], constants: dict[str, Any], device: int
    ) -> None:
        self._kernel, self._launch, self._device = kernel, kernel[grid], device
        self._grid = (*grid, 1, 1)[:3]
        self._numbers, self._constants = numbers, constants
        names = getattr(kernel, "arg_names", ())
        self._rest = (*numbers, *(constants[name] for name in names if name in constants))
        self._run: Callable[..., object] | None = None

    def __call__(
        self, tensors: Sequence[Tensor | None], numbers: tuple[int, ...] = (), addresses: Sequence[int] | None = None
    ) -> None:
        """Launch the kernel on the current stream.

        Args:
            tensors: the first arguments of the kernel. In every call, the same ones are None, and the others have the
                same dtypes and devices.
            numbers: numbers of 32 bits that change from call to call, the next arguments, for which the kernel is not
                specialised.
            addresses: those of the tensors, 0 for None, if the caller knows them.
        """
        if self._device >= 0 and self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):  # Triton launches on the current device, wherever the tensors are
                self(tensors, numbers, addresses)
            return
        if addresses is None:
            addresses = [0 if x is None else x.data_ptr() for x in tensors]
        is_aligned = math.gcd(_ALIGNMENT, *addresses) == _ALIGNMENT  # others need another compiled kernel
        if is_aligned and self._run is not None and not self._kernel.pre_run_hooks:
            self._run(*addresses, *numbers, *self._rest)
            return
        compiled = self._launch(*tensors, *numbers, *self._numbers, **self._constants)
        if is_aligned and _may_be_kept(compiled):
            self._run = _without_hooks(compiled, self._grid, self._device)


def _may_be_kept(compiled: Any) -> bool:
    """Return True for a kernel compiled for a CUDA device by a tested version; None is returned by the interpreter."""
    if compiled is None:
        return False
    import triton
    from triton.compiler import CompiledKernel

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if not _TESTED[0] <= version <= _TESTED[1] or type(compiled) is not CompiledKernel:
        return False
    return compiled.metadata.target.backend == "cuda"  # for others, Triton looks at more than the alignment


def _without_hooks(compiled: Any, grid: tuple[int, ...], device: int) -> Callable[..., object]:
    """Return what launches a compiled kernel as `compiled[grid]` does, without preparing what only hooks are told."""
    from triton import knobs
    from triton.runtime import driver

    with_hooks, runtime, active = compiled[grid], knobs.runtime, cast(Any, driver.active)
    run, current_stream = compiled.run, active.get_current_stream
    fixed = compiled.function, compiled.packed_metadata, None, None, None

    def launch(*arguments: Any) -> None:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # lists of hooks in newer versions
            with_hooks(*arguments)
        else:
            run(*grid, current_stream(device), *fixed, *arguments)

    return launch


def geometry(x: Tensor | None) -> Hashable:
    """Return everything about a tensor that a launch may depend on, except its address."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device())


class LaunchKey:
    """Stands for all calls whose tensors have one geometry, so that they are compared once in each call.

    Attributes:
        known: what was found out about these calls; None until one of them was launched.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: Any = None


class Kept(dict[Any, Value]):
    """A dictionary of what was prepared for calls of each geometry. It is cleared when it holds too many."""

    def __setitem__(self, key: Any, value: Value) -> None:
        if len(self) >= _MOST_KEPT:
            self.clear()
        super().__setitem__(key, value)
