"""The next token of generation: one call of a kernel in place of a layer's shift, norms, rotary embedding and cache.

On a CPU it is a call of the compiled kernel, on a GPU a launch of a Triton kernel.

`prepare_next_token` decides once per forward pass. `Token.shift_and_cache` then computes each layer, with the bits of
`kvshift.models.decoder.shift_and_cache`, the general way. (Attention after it reads longer tensors, for which MKL sums
in another order on some CPUs if the size of a head is no multiple of 4.) That way remains for everything else:

- the pass: several tokens, padding, documents, no cache or one with an `update` of its own, gradients, compilers and
  tracers, a backend other than "auto", no kernel for the device, float64, tensor subclasses, hooks on all modules;
- the layer: a shift that is not a `KVShift`, of queries, wider than 2, constrained, parametrized, hooked or not in
  float32; norms other than Llama's, or hooked; rotation other than Llama's; a cache that records for drafts;
- the tensors: projections of another dtype, as under autocast, or of another shape than the state.

Shapes: B batch, T positions, H query heads, G KV heads, N cached tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from transformers.cache_utils import Cache

from kvshift.layers import KVShift
from kvshift.models.cache import (
    ShiftCacheLayer,
    ShiftDynamicLayer,
    ShiftSlidingWindowLayer,
    ShiftStaticLayer,
    ShiftStaticSlidingWindowLayer,
    StaticShiftCacheLayer,
)
from kvshift.ops.arguments import Gains
from kvshift.ops.cpu import next_token as cpu_next_token
from kvshift.ops.dispatch import choose_backend, has_plain_forward, is_gpu
from kvshift.ops.rope import Rotary, half_tables
from kvshift.ops.torch_ops import needs_traceable_ops
from kvshift.ops.triton import next_token as triton_next_token

NextToken = cpu_next_token.NextToken | triton_next_token.NextToken
TokenTables = Any  # of the same module
Heads = tuple[Tensor, Tensor, Tensor]
Masks = dict[str, Tensor | None]
_NO_GAINS: Gains = (None, None, 0.0)
_SHIFT = KVShift.forward  # before anybody replaces it

_MIN_ROOM, _ROOM = 64, 8  # tokens of room that a growing cache is given: at least these, and one for every so many


def prepare_next_token(
    decoder: Any, hidden_states: Tensor, rotary: Any, masks: Masks, cache: Cache | None, attn_implementation: str | None
) -> dict[str, Token]:
    """Return what the layers need to compute the next token in one call each.

    Args:
        decoder: the `RotaryDecoder`.
        hidden_states: input of the first layer, (B, T, E).
        rotary: tables of transformers, (L, T, D), of all layers, or a dict of them by type of layer.
        masks: the result of `kvshift.models.documents.create_masks`.
        cache: the cache of the pass, after `ensure_shift_cache`.
        attn_implementation: name of the attention function.

    Returns:
        A `Token` for each type of layer, "attention" if all are alike; none if this pass needs the general way.
    """
    if (
        torch.compiler.is_compiling()
        or not decoder.has_llama_layers
        or hidden_states.shape[1] != 1
        or cache is None
        or torch.is_grad_enabled()
        or not masks["padding"] is masks["documents"] is None
        or type(cache).update is not Cache.update
        or "update" in vars(cache)
        or choose_backend("auto") != "auto"
        or needs_traceable_ops()
        or _has_any_global_hook()
        or (kernels := _kernels(hidden_states)) is None
    ):
        return {}
    is_sdpa = attn_implementation == "sdpa"
    try:
        if isinstance(rotary, dict):
            return {layer_type: Token(kernels, tables, is_sdpa) for layer_type, tables in rotary.items()}
        return dict.fromkeys(masks, Token(kernels, rotary, is_sdpa))
    except ValueError:
        return {}


def _kernels(x: Tensor) -> Any:
    """Return the module with the kernel for the device and dtype of x; None if there is none."""
    if not (x.is_cpu or is_gpu(x)):
        return None
    kernels = triton_next_token if is_gpu(x) else cpu_next_token
    return kernels if x.dtype in kernels.next_token_dtypes() else None


class Token:
    """The next token of every sequence.

    Args:
        kernels: the module with the kernel.
        rotary: tables as in `prepare_next_token`.
        is_sdpa: whether PyTorch's attention follows, which converts boolean masks in every layer.

    Raises:
        ValueError: the kernel cannot read the tables.

    Attributes:
        takes_whole: whether the kernel takes the heads of a projection side by side, (B, 1, H D).
    """

    __slots__ = ("_converted", "_is_sdpa", "_prepare", "_rotary", "_tables", "takes_whole")

    def __init__(self, kernels: Any, rotary: Rotary, is_sdpa: bool) -> None:
        self._prepare, self._rotary, self._is_sdpa = kernels.NextToken, rotary, is_sdpa
        self._converted: dict[int, tuple[Tensor, int, Tensor]] = {}  # by the identity of the mask
        self.takes_whole = kernels is cpu_next_token
        self._tables = kernels.TokenTables(rotary if kernels is cpu_next_token else half_tables(*rotary))

    def shift_and_cache(
        self, attention: Any, q: Tensor, k: Tensor, v: Tensor, cache: Cache, rotary: Rotary | None
    ) -> Heads | None:
        """Shift, normalise, rotate and cache the token in one layer; None if that needs the general way.

        Args:
            attention: a `ShiftedAttention`.
            q, k, v: projections, (B, 1, H, D), (B, 1, G, D) and (B, 1, G, Dv), or whole.
            cache: the cache of the pass.
            rotary: tables of the layer; those of the pass, unless a hook or a subclass has given it others.

        Returns:
            q (B, H, 1, D); k and v (B, G, N, D), cached tokens included.
        """
        if attention.llama_norm is None or torch.compiler.is_compiling():
            return None
        layer: Any = cache.layers[attention.layer_idx]
        write = None if "update" in layer.__dict__ else _WRITE.get(type(layer))
        shift = attention._modules["shift"]
        if write is None or layer.record_past or layer.keys is None:
            return None
        if type(shift) is not KVShift or KVShift.forward is not _SHIFT:
            return None
        if rotary is None or rotary[0] is not self._rotary[0] or rotary[1] is not self._rotary[1]:
            return None
        coefficients = shift.coefficients_alone()
        gains = _gains(attention) if attention.qk_norm else _NO_GAINS
        if coefficients is None or gains is None:
            return None
        call = layer.next_token
        if call is None or not call.is_current(layer._shift_state, coefficients, gains):
            prepare = self._prepare if q.ndim == 4 else partial(self._prepare, size=attention.head_dim)
            call = layer.next_token = _prepare_layer(prepare, layer, q, k, v, coefficients, gains)
        if call is None or not call.takes(q, k, v, self._tables):
            return None
        return write(layer, call, q, k, v, self._tables)

    def scores(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return a boolean mask of attention as terms of the scores, converted once for all layers with the same mask.

        A hook on a layer sees the mask as it is in any other pass, and may change it or give another.
        """
        if mask is None or not self._is_sdpa or mask.dtype != torch.bool or mask.ndim != 4 or mask.is_inference():
            return mask
        converted = self._converted.get(id(mask))
        if converted is None or mask._version != converted[1]:
            scores = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)
            converted = self._converted[id(mask)] = mask, mask._version, scores
        return converted[2]


def _gains(attention: Any) -> Gains | None:
    """Return the gains and the epsilon of both norms, if calling them computes Llama's formula and nothing else."""
    norms = attention._modules["q_norm"], attention._modules["k_norm"]
    for norm in norms:
        if (
            type(norm) is not attention.llama_norm
            or norm._forward_hooks
            or norm._forward_pre_hooks
            or not has_plain_forward(norm)
        ):
            return None
    (q_gain, eps), (k_gain, k_eps) = ((norm._parameters.get("weight"), norm.variance_epsilon) for norm in norms)
    return None if q_gain is None or k_gain is None or k_eps != eps else (q_gain, k_gain, eps)


def _prepare_layer(
    prepare: Callable[..., NextToken],
    layer: ShiftCacheLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: tuple[Any, Any],
    gains: Gains,
) -> NextToken | None:
    """Prepare the calls for a layer, and give it a state of its own, because calls overwrite it."""
    state = layer._shift_state
    if not coefficients[0] is coefficients[1] is None:
        if state is None or state.q is not None or not state.rows == state.max_rows == 1:
            return None
        if not isinstance(layer, StaticShiftCacheLayer):  # whose state is always its own
            state = state.clone()
    try:
        call = prepare(q, k, v, state, *coefficients, gains)
    except ValueError:
        return None
    layer._shift_state = state
    return call


# How the layers of a cache are written --------------------------------------------------------------------------------


def _append(
    layer: ShiftDynamicLayer, call: NextToken, q: Tensor, k: Tensor, v: Tensor, tables: TokenTables
) -> Heads | None:
    """Write to the room after the tokens of a growing cache, whose keys and values are views of longer tensors."""
    keys: Any = layer.keys
    values: Any = layer.values
    cached: Any = call.cached
    if (
        cached is None
        or keys is not cached[0]
        or values is not cached[1]
        or keys.shape[2] == cached[2]
        or keys.data_ptr() != call.k_address  # as after pickling, which can move them to shared memory
        or values.data_ptr() != call.v_address
    ):
        if not _make_room(call, keys, values):
            return None
        cached = call.cached
    at = keys.shape[2]
    q = call(q, k, v, tables, at)
    (k_room, v_room), (heads, size, strides, v_size, v_strides) = call.buffers, cached[3:]
    keys = k_room.as_strided((*heads, at + 1, size), strides)  # less work than `narrow`, at every token
    values = v_room.as_strided((*heads, at + 1, v_size), v_strides)
    layer.keys, layer.values = keys, values
    call.cached = keys, values, *cached[2:]
    return q, keys, values


def _make_room(call: NextToken, keys: Tensor, values: Tensor) -> bool:
    """Copy the cached tokens into longer tensors and let the call write there; False if it cannot."""
    call.cached = call.buffers = None  # freed before the new ones are allocated
    if keys.ndim != 4 or values.ndim != 4 or keys.dtype is not call.dtype or values.dtype is not call.dtype:
        return False
    tokens = keys.shape[2]
    room = tokens + max(_MIN_ROOM, tokens // _ROOM)
    k_room, v_room = (x.new_empty(*x.shape[:2], room, x.shape[3]) for x in (keys, values))
    if not call.write_to(k_room, v_room):
        return False
    k_room[:, :, :tokens], v_room[:, :, :tokens] = keys, values
    sizes = keys.shape[:2], keys.shape[3], k_room.stride(), values.shape[3], v_room.stride()
    call.cached = keys, values, room, *sizes
    return True


def _overwrite(
    layer: ShiftStaticLayer, call: NextToken, q: Tensor, k: Tensor, v: Tensor, tables: TokenTables
) -> Heads | None:
    """Write at index `cumulative_length`, which the kernel increments."""
    keys: Any = layer.keys
    values: Any = layer.values
    length = layer.cumulative_length
    is_prepared = (
        call.buffers is not None
        and keys is call.buffers[0]
        and values is call.buffers[1]
        and length is call.length
        and keys.data_ptr() == call.k_address
        and values.data_ptr() == call.v_address
        and length.data_ptr() == call.length_address
    )
    if not is_prepared and not call.write_to(keys, values, length):
        return None
    q = call(q, k, v, tables, layer.tokens_fed)
    layer.tokens_fed += 1
    return q, keys, values


def _update(layer: Any, call: NextToken, q: Tensor, k: Tensor, v: Tensor, tables: TokenTables) -> Heads | None:
    """Write to tensors of one token, with which a cache layer with a sliding window updates itself."""
    if layer.keys.ndim != 4:
        return None
    k_new, v_new = (x.new_empty(*x.shape[:2], 1, x.shape[3]) for x in (layer.keys, layer.values))
    if not call.write_to(k_new, v_new):
        return None
    return call(q, k, v, tables, 0), *layer.update(k_new, v_new)


_WRITE: dict[type, Callable[..., Heads | None]] = {
    ShiftDynamicLayer: _append,
    ShiftStaticLayer: _overwrite,
    ShiftSlidingWindowLayer: _update,
    ShiftStaticSlidingWindowLayer: _update,
}
