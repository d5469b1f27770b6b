"""What is kept for the backward pass.

Hooks on saved tensors would be in the way of `kvshift.layers.recompute`, which is one itself. So what is counted is
memory that a forward pass took and that is still held when it has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["bytes_saved"]

_BLOCK = 512  # CUDA's caching allocator hands out multiples of it


def bytes_saved(run: Callable[[], Any], device: torch.device, *, compiled: bool = False) -> int:
    """Bytes that are held after a forward pass and were not before it, what it returns left out.

    On CUDA that is what the allocator says. On a CPU it is the storages that operations made; what compiled code makes
    they do not see, so there it is what hooks on saved tensors see, without the leaves of the graph.
    """
    if device.type == "cuda":
        return _by_allocator(run, device)
    return _by_hooks(run) if compiled else _by_storages(run)


def _by_allocator(run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device) - before
    return held - sum(-(-size // _BLOCK) * _BLOCK for size in _storages(result).values())


def _by_storages(run: Callable[[], Any]) -> int:
    with _Allocations() as allocations:
        result = run()
    returned = _storages(result)
    return sum(
        size
        for address, (storage, size) in allocations.made.items()
        if address not in returned and not storage.expired()
    )


def _by_hooks(run: Callable[[], Any]) -> int:
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes twice

    def pack(x: Tensor) -> Tensor:
        if not x.is_leaf or not x.requires_grad:
            kept[x.untyped_storage()._cdata] = x.untyped_storage()
        else:
            leaves.add(x.untyped_storage()._cdata)
        return x

    leaves: set[int] = set()
    with saved_tensors_hooks(pack, lambda x: x):
        result = run()
    without = {*leaves, *_storages(result)}
    return sum(storage.nbytes() for address, storage in kept.items() if address not in without)


class _Allocations(TorchDispatchMode):
    """The storages that come out of operations without having gone into any."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for address in _storages((args, kwargs)):
            if address not in self.made:
                self._known.add(address)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # keeps the address from being given out again
                if reference.cdata not in self._known:
                    self.made.setdefault(reference.cdata, (reference, storage.nbytes()))
        return result


def _storages(value: Any) -> dict[int, int]:
    """Bytes by address."""
    found = (tensor.untyped_storage() for tensor in tree_leaves(value) if isinstance(tensor, Tensor))
    return {storage._cdata: storage.nbytes() for storage in found}
