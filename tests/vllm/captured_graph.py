"""Record on a CPU what a CUDA graph would hold of a call, and replay it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WITHOUT_LAUNCH = (
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::scalar_tensor",
)  # the last one creates a scalar on the host


class HostWaitError(AssertionError):
    """The host has read data of the device, which is impossible during capture of a CUDA graph."""


class CapturedGraph(TorchDispatchMode):
    """The operations and the Triton launches of a call, in order, on the same tensors and with the values of numbers.

    Unlike in a CUDA graph, operations also run while they are captured; launches do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, Callable[[], None]]] = []
        self.launches: list[tuple[tuple[int, ...], Callable[[], None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        by_numbers = func is torch.ops.aten.index.Tensor and not any(_is_mask(index) for index in args[1])
        if _WAITS.intersection(func.tags) and not by_numbers:
            raise HostWaitError(str(func))
        result = call()
        if not func.is_view and func.name().partition(".")[0] not in _WITHOUT_LAUNCH:
            self.operations.append((func.name(), partial(_repeat, call, result)))
        return result

    def replay(self) -> None:
        """Repeat everything with the current data of the tensors."""
        for _, repeat in self.operations + self.launches:
            repeat()

    def recording(self, kernel: Any) -> Any:
        """Return `kernel` in a wrapper that captures its launches instead of running them."""
        return _Recording(kernel, self.launches)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A context in which everything is captured and the host may not read data."""
        with pytest.MonkeyPatch.context() as patch, self:
            for name in ("tolist", "numpy", "cpu", "__array__"):  # not dispatched for CPU tensors
                patch.setattr(torch.Tensor, name, _refuse(name))
            yield


class _Recording:
    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.launches.append((grid, partial(self.kernel[grid], *args, **options)))

        return launch


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _repeat(call: Callable[[], Any], result: Any) -> None:
    again = call()
    if isinstance(result, torch.Tensor) and again is not result:
        result.copy_(again)


def _refuse(name: str) -> Callable[..., Any]:
    def refused(*args: Any, **options: Any) -> Any:
        raise HostWaitError(f"Tensor.{name}")

    return refused
