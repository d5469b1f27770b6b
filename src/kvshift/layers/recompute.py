"""Recomputation, in backward, of the tensors that attention would save although they are cheap to recompute.

The shift saves the raw keys and values, which it needs for the gradients of its coefficients, and attention saves the
shifted ones. Backward can recompute the shifted ones from the raw ones in one pass over memory. Saving only the raw
ones therefore reduces the memory of training to that without a shift.

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
from kvshift.ops.boundaries import is_sharing_plans
from kvshift.ops.dispatch import fused_path
from kvshift.ops.memory import PLAIN_TENSOR_TYPES
from kvshift.ops.rope import Rotary
from kvshift.ops.shift import with_plan
from kvshift.ops.torch_ops import needs_traceable_ops

SAVE_ALL: AbstractContextManager[None] = nullcontext()
"""The context used instead of `recompute_in_backward` if all tensors are to be saved."""

_MIN_ELEMENTS = {"cpu": 2**20, "device": 2**21}  # elements
_CAST = "ToCopyBackward0"
_REPEAT = ["ViewBackward0", "CloneBackward0", "ExpandBackward0", "UnsqueezeBackward0"]


def recompute_shift_in_backward(
    shift: KVShift,
    raw: tuple[Tensor, Tensor],
    shifted: tuple[Tensor, Tensor],
    *,
    state: ShiftState | None = None,
    rotary: Rotary | None = None,
    norms: Norms | None = None,
    **where: Any,
) -> AbstractContextManager[None]:
    """Within this context, attention saves the raw k and v for backward instead of the shifted ones.

    This saves memory at the cost of one more shift, and changes no bit of any result or gradient. Tensors are saved as
    usual if `shift` computes another formula than `KVShift`, if their coefficients are not trained, if other hooks
    handle the tensors that autograd saves, or if hooks on the modules could change their outputs.

    Args:
        shift: the layer that computed the shift.
        raw: the k and v that were passed to `KVShift.forward`.
        shifted: the k and v that it returned and that attention will get, in any view.
        state, rotary, norms, where: the other arguments of `KVShift.forward`.
    """
    if type(shift).forward is not KVShift.forward:
        return SAVE_ALL  # another formula stands in its place
    if not (is_worth_recomputing(raw[0]) and may_recompute(shift, *(norms or ()))):
        return SAVE_ALL
    parameters = (shift.alpha, shift.beta)
    if any(parameter is not None and not isinstance(parameter, nn.Parameter) for parameter in parameters):
        return SAVE_ALL  # parametrized or pruned: could differ when it is recomputed
    trained = [parameter is not None and parameter.requires_grad for parameter in parameters]
    if not any(trained) or any(type(tensor) is not Tensor for tensor in (*raw, *shifted)):
        return SAVE_ALL
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
    call = call._replace(gamma=None)  # only keys and values
    if is_sharing_plans():  # otherwise, recomputation makes the plan, if it takes place
        call = with_plan(call)
    if path == "unfused" and alpha is None:  # keys are saved as usual
        call = call._replace(cos=None, sin=None, norms=None)
    read = [] if norms is None else [*norms[1].parameters(), *norms[1].buffers()]
    inputs = (*call[:TENSORS], *call.boundaries().values(), *read)
    outputs = [tensor if is_trained else None for tensor, is_trained in zip(shifted, trained, strict=True)]
    return recompute_in_backward(
        outputs,
        lambda: run(path, call)[1:3],
        [tensor for tensor in inputs if tensor is not None],
    )


def is_worth_recomputing(x: Tensor) -> bool:
    """Return True if x is so large that shifting it again in backward costs less than 1 % of a training step.

    It takes about 0.2 ms of CPU time per layer, whatever the size. On a CPU, this is 1 % if a layer's part of a step
    takes 20 ms. On a GPU, it costs nothing as long as the host waits for the GPU and not the GPU for the host.
    """
    return x.numel() >= _MIN_ELEMENTS["cpu" if x.is_cpu else "device"]


def may_recompute(*modules: nn.Module) -> bool:
    """Return True if autograd records eagerly, without other saved-tensor hooks and without hooks on `modules`.

    Only the innermost saved-tensor hooks get a tensor, and those of activation checkpointing, `save_on_cpu` or the user
    take precedence. A compiler decides by itself what to recompute. Hooks on a module may change its output.
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
def recompute_in_backward(
    outputs: Sequence[Tensor | None], function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]
) -> Iterator[None]:
    """Within this context, autograd does not save the tensors in `outputs`; backward recomputes them.

    This applies to views of an output, whatever their shape, and to two kinds of copies: those in another dtype, which
    autocast makes, and those with each head repeated for a group of query heads, which `repeat_kv` of transformers
    makes. All other tensors are saved. Recomputed tensors are kept until backward has used each of them as often as it
    was not saved, so that `function` is called once per backward pass.

    Args:
        outputs: the inputs of attention, or None for those to be saved as usual. They must not share memory with
            `inputs`.
        function: recomputes all outputs, with the same bits and memory layout, in any view. It is called without
            gradients.
        inputs: all tensors that `function` reads and that may change.

    Raises:
        RuntimeError: in backward, as in autograd, if an input or a saved tensor has been modified in place.
    """
    recomputation = _Recomputation(outputs, function, inputs)
    with saved_tensors_hooks(recomputation.pack, lambda unpack: unpack()):
        yield
    recomputation.outputs.clear()  # so that they can be freed


class _Recomputation:
    """The saved-tensor hooks of one `recompute_in_backward` context.

    In place of each tensor that autograd saves, they store a function that returns it.

    Attributes:
        outputs: outputs by index, while attention runs.
        layouts: size of the storage in bytes, dtype, and place in the storage of each output.
        uses: number of times that each output was not saved.
        recomputed: recomputed outputs, each as often as this backward pass will still use it.
    """

    def __init__(
        self, outputs: Sequence[Tensor | None], function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> None:
        self.outputs = {i: x for i, x in enumerate(outputs) if x is not None and x.numel()}
        self.layouts = {i: (x.untyped_storage().nbytes(), x.dtype, _view_arguments(x)) for i, x in self.outputs.items()}
        self.function = function
        self.inputs = [_version_checked(x) for x in inputs]
        self.uses = dict.fromkeys(self.outputs, 0)
        self.recomputed: dict[int, list[Tensor]] = {i: [] for i in self.outputs}

    def pack(self, x: Tensor) -> Callable[[], Tensor]:
        if type(x) in PLAIN_TENSOR_TYPES and x.layout == torch.strided:
            address = x.untyped_storage().data_ptr()
            for i, output in self.outputs.items():
                is_view = address == output.untyped_storage().data_ptr()
                repeats = 1 if is_view else _repeats(x, output)
                if repeats:
                    self.uses[i] += 1
                    return partial(self.recompute, i, repeats, x.dtype, _view_arguments(x))
        return _version_checked(x)

    @torch.no_grad()
    def recompute(self, i: int, repeats: int, dtype: torch.dtype, place: tuple[Any, ...]) -> Tensor:
        """Return a tensor that was not saved. The first call recomputes all outputs."""
        for unchanged in self.inputs:
            unchanged()
        if not self.recomputed[i]:
            outputs = self.function()
            self.recomputed = {i: [self.in_layout(i, outputs[i])] * uses for i, uses in self.uses.items() if uses}
        x = self.recomputed[i].pop()
        if repeats > 1:
            x = x.repeat_interleave(repeats, dim=1)
        return x.to(dtype).as_strided(*place)

    def in_layout(self, i: int, x: Tensor) -> Tensor:
        """Return x in the same view of its storage as output i."""
        nbytes, dtype, place = self.layouts[i]
        if x.untyped_storage().nbytes() != nbytes or x.dtype != dtype:
            raise RuntimeError(
                f"a tensor recomputed for backward has {x.untyped_storage().nbytes()} bytes of {x.dtype}, "
                f"expected {nbytes} of {dtype}"
            )
        return x.as_strided(*place)


def _view_arguments(x: Tensor) -> tuple[Any, ...]:
    """Return size, stride and storage offset of a tensor, the arguments of `Tensor.as_strided`."""
    return x.size(), x.stride(), x.storage_offset()


def _version_checked(x: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns x if it is unmodified; with hooks, autograd does not check versions itself."""
    version = None if x.is_inference() else x._version
    x = x.detach()  # a node that references its own output would never be freed

    def unchanged() -> Tensor:
        if version is not None and x._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{x.type()} {list(x.shape)}] is at version {x._version}; expected version {version} instead"
            )
        return x

    return unchanged


def _repeats(x: Tensor, output: Tensor) -> int:
    """Return how often x, a copy of the output (B, G, T, D), repeats each of its heads; 0 if x is no such copy.

    This depends on the graph, not on values. Copies are  cast(output),  repeat(output)  and  cast(repeat(output))  with
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
