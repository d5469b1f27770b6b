"""Tensors that attention would keep for backward although they are cheap to recompute.

The shift keeps the raw keys and values, whose products with gradients are the gradients of its coefficients; attention
keeps the shifted ones. Backward can make the latter from the former with one pass over memory, so one of the two is
enough: what training keeps is then what it keeps without a shift.

Shapes: B batch, T positions, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
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
    rotary: Rotary | None = None,
    norms: Norms | None = None,
    **where: Any,
) -> AbstractContextManager[None]:
    """While it is open, attention keeps the raw k and v for backward in place of the shifted ones.

    Nothing changes, the bits of gradients included, but memory and one more pass of the shift. Tensors are kept as they
    are where their coefficients are not trained, where other hooks handle what autograd keeps, and where hooks on the
    modules may change what they return.

    Args:
        shift: the layer that shifted.
        raw: k and v as `KVShift.forward` got them.
        shifted: what it made of them and attention is about to be given, in any view.
        state, rotary, norms, where: all else that `KVShift.forward` got.
    """
    if not (is_worth_recomputing(raw[0]) and may_recompute(shift, *(norms or ()))):
        return KEEP_ALL
    parameters = (shift.alpha, shift.beta)
    if any(parameter is not None and not isinstance(parameter, nn.Parameter) for parameter in parameters):
        return KEEP_ALL  # parametrized or pruned: computed once more, it might be another
    trained = [parameter is not None and parameter.requires_grad for parameter in parameters]
    if not any(trained) or any(type(tensor) is not Tensor for tensor in (*raw, *shifted)):
        return KEEP_ALL
    with torch.no_grad():
        coefficients = shift.coefficients()
    alpha, beta = (
        coefficients[target] if is_trained else None for target, is_trained in zip("kv", trained, strict=True)
    )
    call = Call(
        None, raw[0].detach(), raw[1].detach(), alpha, beta, *((None, None) if state is None else (state.k, state.v)),
        *(rotary or (None, None)), norms=norms, gamma=coefficients.get("q"), max_rows=0, **where,
    )  # fmt: skip
    path = fused_path(call)
    call = call._replace(gamma=None)  # keys and values alone
    if shares_plans():  # else it is made where it is needed again, if it is
        call = with_plan(call)
    if path == "unfused" and alpha is None:  # keys are kept
        call = call._replace(cos=None, sin=None, norms=None)
    read = [] if norms is None else [*norms[1].parameters(), *norms[1].buffers()]
    inputs = (*call[:TENSORS], *call.boundaries().values(), *read)
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
    with saved_tensors_hooks(recomputation.pack, lambda unpack: unpack()):
        yield
    recomputation.outputs.clear()  # they are free to go


class _Recomputation:
    """What is common to all tensors that were left out of one call.

    In place of each tensor that autograd keeps, it keeps a function that returns it.

    Attributes:
        outputs: by their index, while attention runs.
        layouts: of each output: bytes of its memory, dtype, and its place there.
        uses: how often each output was left out.
        made: each output as often as it will still be asked for in this backward pass.
    """

    def __init__(
        self, outputs: Sequence[Tensor | None], function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> None:
        self.outputs = {i: x for i, x in enumerate(outputs) if x is not None and x.numel()}
        self.layouts = {i: (x.untyped_storage().nbytes(), x.dtype, _place(x)) for i, x in self.outputs.items()}
        self.function = function
        self.inputs = [_kept(x) for x in inputs]
        self.uses = dict.fromkeys(self.outputs, 0)
        self.made: dict[int, list[Tensor]] = {i: [] for i in self.outputs}

    def pack(self, x: Tensor) -> Callable[[], Tensor]:
        if type(x) in PLAIN and x.layout == torch.strided:
            address = x.untyped_storage().data_ptr()
            for i, output in self.outputs.items():
                is_view = address == output.untyped_storage().data_ptr()
                repeats = 1 if is_view else _repeats(x, output)
                if repeats:
                    self.uses[i] += 1
                    return partial(self.remake, i, repeats, x.dtype, _place(x))
        return _kept(x)

    @torch.no_grad()
    def remake(self, i: int, repeats: int, dtype: torch.dtype, place: tuple[Any, ...]) -> Tensor:
        """A tensor that was left out; all outputs are recomputed when the first of them is asked for."""
        for unchanged in self.inputs:
            unchanged()
        if not self.made[i]:
            outputs = self.function()
            self.made = {i: [self.in_layout(i, outputs[i])] * uses for i, uses in self.uses.items() if uses}
        x = self.made[i].pop()
        if repeats > 1:
            x = x.repeat_interleave(repeats, dim=1)
        return x.to(dtype).as_strided(*place)

    def in_layout(self, i: int, x: Tensor) -> Tensor:
        """x in the view that the output was."""
        nbytes, dtype, place = self.layouts[i]
        if x.untyped_storage().nbytes() != nbytes or x.dtype != dtype:
            raise RuntimeError(
                f"a tensor recomputed for backward has {x.untyped_storage().nbytes()} bytes of {x.dtype}, "
                f"expected {nbytes} of {dtype}"
            )
        return x.as_strided(*place)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Which elements of its memory a tensor consists of, as `Tensor.as_strided` takes them."""
    return x.size(), x.stride(), x.storage_offset()


def _kept(x: Tensor) -> Callable[[], Tensor]:
    """A function that returns x as it is now: autograd does not look at versions where there are hooks."""
    version = None if x.is_inference() else x._version
    x = x.detach()  # a node that held its own output would never be freed

    def unchanged() -> Tensor:
        if version is not None and x._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{x.type()} {list(x.shape)}] is at version {x._version}; expected version {version} instead"
            )
        return x

    return unchanged


def _repeats(x: Tensor, output: Tensor) -> int:
    """How often each head of the output, (B, G, T, D), stands in x, a copy of it; 0 where x is no such copy.

    Only what the graph says counts, not the values:  cast(output),  repeat(output)  or  cast(repeat(output))  with
        repeat = view (B, G * n, T, D)  of  clone  of  expand (B, G, n, T, D)  of  unsqueeze 2
    """
    nodes: list[Any] = []
    node: Any = x.grad_fn
    while node is not None and node is not output.grad_fn and len(nodes) <= len(_REPEAT):
        nodes.append(node)
        node = node.next_functions[0][0] if node.next_functions else None
    if node is None or node is not output.grad_fn:
        return 0
    names = [node.name().replace("UnsafeView", "View") for node in nodes]
    if names == [_CAST]:
        return int(x.size() == output.size() and x.stride() == output.stride())
    if names[:1] == [_CAST]:
        del nodes[0], names[0]
    if names != _REPEAT or nodes[-1]._saved_dim != 2 or not x.is_contiguous():
        return 0
    batch, groups, repeats, *rest = nodes[0]._saved_self_sym_sizes
    is_repeat = output.size() == (batch, groups, *rest) and x.shape == (batch, groups * repeats, *rest)
    return repeats if is_repeat else 0
