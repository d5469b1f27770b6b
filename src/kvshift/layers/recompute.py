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
from torch.nn.modules.module import _has_any_global_hook

from kvshift.layers.shift import KVShift
from kvshift.ops import ShiftState
from kvshift.ops.arguments import TENSORS, Call, Norms
from kvshift.ops.attention_inputs import run
from kvshift.ops.boundaries import shares_plans
from kvshift.ops.dispatch import fused_path
from kvshift.ops.rope import Rotary
from kvshift.ops.shift import with_plan
from kvshift.ops.torch_ops import PLAIN, needs_traceable_ops

KEEP_ALL: AbstractContextManager[None] = nullcontext()
"""Stands for `recomputed` where nothing is to be left out."""

_WORTH_RECOMPUTING = {"cpu": 2**20, "device": 2**21}  # elements
_CAST = "ToCopyBackward0"
_REPEAT = ["ViewBackward0", "CloneBackward0", "ExpandBackward0", "UnsqueezeBackward0"]


def recomputing(
    shift: KVShift,
    raw: tuple[Tensor, Tensor],
    shifted: tuple[Tensor, Tensor],
    *,
    state: ShiftState | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    rotary: Rotary | None = None,
    norms: Norms | None = None,
    backend: str = "auto",
) -> AbstractContextManager[None]:
    """While it is open, attention keeps the raw k and v for backward in place of the shifted ones.

    Nothing changes, the bits of gradients included, but memory and one more pass of the shift. Tensors are kept as they
    are where their coefficients are not trained, where other hooks handle what autograd keeps, and where hooks on the
    modules may change what they return.

    Args:
        shift: the layer that shifted.
        raw: k and v as `KVShift.forward` got them.
        shifted: what it made of them and attention is about to be given, in any view.
        state, cu_seqlens, seq_idx, mask, rotary, norms, backend: as `KVShift.forward` got them.
    """
    if not (is_worth_recomputing(raw[0]) and may_recompute(shift, *(norms or ()))):
        return KEEP_ALL
    parameters = (shift.alpha, shift.beta)
    if any(parameter is not None and not isinstance(parameter, nn.Parameter) for parameter in parameters):
        return KEEP_ALL  # parametrized or pruned: computed once more, it might be another
    trained = [parameter is not None and parameter.requires_grad for parameter in parameters]
    if not any(trained) or any(type(tensor) is not Tensor for tensor in (*raw, *shifted)):
        return KEEP_ALL
    k, v = raw[0].detach(), raw[1].detach()
    with torch.no_grad():
        coefficients = shift.coefficients()
    alpha, beta = (
        coefficients[target] if is_trained else None for target, is_trained in zip("kv", trained, strict=True)
    )
    call = Call(
        None, k, v, alpha, beta, *((None, None) if state is None else (state.k, state.v)), *(rotary or (None, None)),
        cu_seqlens=cu_seqlens, seq_idx=seq_idx, mask=mask, norms=norms, gamma=coefficients.get("q"), max_rows=0,
        backend=backend,
    )  # fmt: skip
    path = fused_path(call)
    call = call._replace(gamma=None)  # keys and values alone
    if shares_plans():  # else it is made where it is needed again, if it is
        call = with_plan(call)
    if path == "unfused" and alpha is None:  # keys are kept
        call = call._replace(cos=None, sin=None, norms=None)
    k_norm = None if norms is None else norms[1]
    read = [] if k_norm is None else [*k_norm.parameters(), *k_norm.buffers()]
    inputs = (*call[:TENSORS], *call.boundaries(), *read)
    outputs = [tensor if is_trained else None for tensor, is_trained in zip(shifted, trained, strict=True)]
    return recomputed(
        outputs,
        lambda: run(path, call)[1:3],
        [tensor for tensor in inputs if tensor is not None],
    )


def is_worth_recomputing(x: Tensor) -> bool:
    """Whether x is so large that shifting it once more in backward costs less than 1 % of a training step.

    Each layer takes some 0.2 ms of CPU time whatever the size. On a CPU that is 1 % where a layer's part of a step
    takes 20 ms; on a GPU it is nothing as long as the host waits for the GPU, not the GPU for it.
    """
    return x.numel() >= _WORTH_RECOMPUTING["cpu" if x.is_cpu else "device"]


def may_recompute(*modules: nn.Module) -> bool:
    """Whether a graph is being recorded eagerly whose saved tensors nobody else handles, through `modules` as they are.

    Only the innermost hooks on saved tensors see a tensor: activation checkpointing, `save_on_cpu` or the user's own
    must get theirs. A compiler decides by itself what to compute again. Hooks on a module may change what it returns.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or needs_traceable_ops():
        return False
    autograd = getattr(torch._C, "_autograd", None)
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    enabled = getattr(autograd, "_saved_tensors_hooks_is_enabled", None)
    if top is None or enabled is None or not enabled() or top(True) is not None:
        return False
    if _has_any_global_hook():
        return False
    return not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in modules
    )


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
        if type(x) in PLAIN and x.layout == torch.strided:
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
