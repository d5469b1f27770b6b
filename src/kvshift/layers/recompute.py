"""Tensors that attention would keep for backward although they are cheap to recompute.

The shift keeps the raw keys and values, whose products with gradients are the gradients of its coefficients; attention
keeps the shifted ones. Backward can make the latter from the former with one pass over memory, so one of the two is
enough: what training keeps is then what it keeps without a shift.

Shapes: B batch, T positions, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

KEEP_ALL: AbstractContextManager[None] = nullcontext()
"""Stands for `recomputed` where nothing is to be left out."""

_PLAIN = (Tensor, nn.Parameter)
_CAST = "ToCopyBackward0"
_REPEAT = ["ViewBackward0", "CloneBackward0", "ExpandBackward0", "UnsqueezeBackward0"]


@contextmanager
def recomputed(
    outputs: Sequence[Tensor | None], function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]
) -> Iterator[None]:
    """While it is open, autograd keeps no tensor that is one of `outputs`; backward makes it again.

    Left out are views of an output, whatever their shape, and two kinds of copies: in another dtype, as autocast makes
    them, and with each head repeated for a group of query heads, as `repeat_kv` of transformers does. All else is kept.
    What is recomputed stays until it has been asked for as often as it was left out: one call of `function` for one
    backward pass.

    Args:
        outputs: what is given to attention; None where that tensor is to be kept. None of them shares memory with the
            inputs.
        function: makes all of them again: the same bits in the same layout of memory, in whatever view. Called
            without gradients.
        inputs: every tensor that `function` reads and that can change.

    Raises:
        RuntimeError: in backward, as autograd does, when an input or a tensor that was kept has been changed in place.
    """
    recomputation = _Recomputation(outputs, function, inputs)
    with saved_tensors_hooks(recomputation.pack, _unpack):
        yield
    recomputation.outputs.clear()  # they are free to go


class _Kept:
    """A tensor with the version that it had: autograd does not look at versions where there are hooks."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()  # a node that held its own output would never be freed
        self.version = None if x.is_inference() else x._version

    def get(self) -> Tensor:
        if self.version is not None and self.x._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.x.type()} {list(self.x.shape)}] is at version {self.x._version}; expected version "
                f"{self.version} instead"
            )
        return self.x


class _Output:
    """One of the outputs, while attention runs."""

    def __init__(self, x: Tensor) -> None:
        self.address = x.untyped_storage().data_ptr()
        self.node = x.grad_fn
        self.view = _View(x)


class _View:
    """Which elements of its memory a tensor consists of."""

    def __init__(self, x: Tensor) -> None:
        self.bytes, self.dtype = x.untyped_storage().nbytes(), x.dtype
        self.place = x.size(), x.stride(), x.storage_offset()

    def of(self, x: Tensor) -> Tensor:
        if x.untyped_storage().nbytes() != self.bytes or x.dtype != self.dtype:
            raise RuntimeError(
                f"what was recomputed for backward has {x.untyped_storage().nbytes()} bytes of {x.dtype}, "
                f"expected {self.bytes} of {self.dtype}"
            )
        return x.as_strided(*self.place)


class _DroppedTensor:
    """One tensor that was left out, in place of which autograd keeps this."""

    def __init__(self, source: _Recomputation, index: int, x: Tensor, repeats: int = 1) -> None:
        self.source, self.index, self.repeats, self.view = source, index, repeats, _View(x)

    def get(self) -> Tensor:
        with torch.no_grad():
            x = self.source.take(self.index)
            if self.repeats > 1:
                x = x.repeat_interleave(self.repeats, dim=1)
            return self.view.of(x.to(self.view.dtype))


class _Recomputation:
    """What is common to all tensors that were left out of one call."""

    def __init__(
        self, outputs: Sequence[Tensor | None], function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> None:
        self.outputs = {i: _Output(x) for i, x in enumerate(outputs) if x is not None and x.numel()}
        self.views = {i: output.view for i, output in self.outputs.items()}
        self.function = function
        self.inputs = [_Kept(x) for x in inputs]
        self.uses = dict.fromkeys(self.outputs, 0)
        self.left: dict[int, int] = {}  # how often each output will still be asked for in this backward pass
        self.made: dict[int, Tensor] = {}

    def pack(self, x: Tensor) -> _Kept | _DroppedTensor:
        if type(x) in _PLAIN and x.layout == torch.strided:
            address = x.untyped_storage().data_ptr()
            for i, output in self.outputs.items():
                repeats = 1 if address == output.address else _repeats(x, output)
                if repeats:
                    self.uses[i] += 1
                    return _DroppedTensor(self, i, x, repeats)
        return _Kept(x)

    def take(self, index: int) -> Tensor:
        """An output, made with the others when the first of them is asked for."""
        for kept in self.inputs:
            kept.get()
        if index not in self.made:
            outputs = self.function()
            self.made = {i: self.views[i].of(outputs[i]) for i, uses in self.uses.items() if uses}
            self.left = dict(self.uses)
        self.left[index] -= 1
        return self.made[index] if self.left[index] else self.made.pop(index)


def _unpack(packed: _Kept | _DroppedTensor) -> Tensor:
    return packed.get()


def _repeats(x: Tensor, output: _Output) -> int:
    """How often each head of the output, (B, G, T, D), stands in x, a copy of it; 0 where x is no such copy.

    Only what the graph says counts, not the values:  cast(output),  repeat(output)  or  cast(repeat(output))  with
        repeat = view (B, G * n, T, D)  of  clone  of  expand (B, G, n, T, D)  of  unsqueeze 2
    """
    nodes: list[Any] = []
    names: list[str] = []
    node: Any = x.grad_fn
    while node is not output.node:
        name = "" if node is None else node.name().replace("UnsafeView", "View")
        if name not in (_CAST, *_REPEAT) or len(nodes) == len(_REPEAT) + 1:
            return 0
        nodes.append(node)
        names.append(name)
        node = nodes[-1].next_functions[0][0]
    size, stride, _ = output.view.place
    if names == [_CAST]:
        return int(x.size() == size and x.stride() == stride)
    if names[:1] == [_CAST]:
        del nodes[0], names[0]
    if names != _REPEAT or nodes[-1]._saved_dim != 2 or not x.is_contiguous():
        return 0
    batch, groups, repeats, *rest = nodes[0]._saved_self_sym_sizes
    is_repeat = (batch, groups, *rest) == tuple(size) and x.shape == (batch, groups * repeats, *rest)
    return repeats if is_repeat else 0
