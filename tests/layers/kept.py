"""Memory saved for backward, measured by the storages that are still alive after forward."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Allocations(TorchDispatchMode):
    """A record of every storage that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages.append((StorageWeakRef(storage), storage.nbytes()))
        return out


def bytes_kept(run: Callable[[], Tensor], *not_counted: Tensor) -> int:
    """Return the bytes allocated by `run` that live as long as its result: the autograd graph's tensors and the result.

    Args:
        not_counted: Tensors that existed before, such as parameters.
    """
    with _Allocations() as allocations:
        out = run()
    there_before = {tensor.untyped_storage()._cdata for tensor in not_counted}
    kept = {
        reference.cdata: size
        for reference, size in allocations.storages
        if not reference.expired() and reference.cdata not in there_before
    }
    assert out.grad_fn is not None
    return sum(kept.values())
