"""Caches that carry the last raw keys and values beside the shifted and rotated ones.

Transformers builds a cache from `config.layer_types`. Its "hybrid" layers have a buffer for such a state, but some of
their methods move only the keys and values. Every operation on the layers below moves both. `ensure_shift_cache`
replaces the layers of an empty cache by these.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    QuantizedCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from kvshift.layers import KVShift
from kvshift.models.configuration import ShiftConfig
from kvshift.models.versions import CACHE, NEWEST, OLDEST
from kvshift.ops import ShiftState
from kvshift.ops.torch_ops import is_exporting


class ShiftCacheLayer:
    """Base class of all cache layers in this package, listed before transformers' own layer class.

    Attributes:
        shift_state: the raw rows of the last cached tokens; None before the first token. One that was read keeps its
            numbers, except in a static cache.
        document_offset: (B,), index of the first token of each row's last document; None if that is 0 in all rows.
        window: number of tokens that the shift mixes, W; 1 without a shift.
        record_past: whether to keep the raw rows of all tokens until `crop` is called, as assisted generation requires.
        next_token: the prepared call of `kvshift.models.next_token`, which overwrites the state at every token. Reading
            `shift_state` ends it; the next call gets a copy.
    """

    _shift_state: ShiftState | None = None
    document_offset: Tensor | None = None
    window: int
    record_past: bool = False
    next_token: Any = None

    def __init__(self, window: int, **sizes: int) -> None:
        super().__init__(**sizes)
        self.window = window

    @property
    def shift_state(self) -> ShiftState | None:
        if not torch.compiler.is_compiling():
            self.next_token = None
        return self._shift_state

    @shift_state.setter
    def shift_state(self, state: ShiftState | None) -> None:
        self._shift_state = state

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies of the layer hold: not the call that writes to this layer's tensors, nor its state."""
        copied = {name: value for name, value in vars(self).items() if name != "next_token"}
        if self.next_token is not None and self._shift_state is not None:
            copied["_shift_state"] = self._shift_state.clone()
        return copied

    def shift_tokens(
        self, shift: KVShift, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Shift the next tokens, continuing from the stored state, and update the state.

        Args:
            q, k, v, mask, options: as in `KVShift.forward`.
        """
        state = self._shift_state
        if self.record_past:
            if mask is not None:
                # For left padding, zeros have the same effect as a mask, and keep one raw row for every position, which
                # is what `crop` counts.
                padding = ~mask[:, :, None, None]
                q, k, v = q.masked_fill(padding, 0), k.masked_fill(padding, 0), v.masked_fill(padding, 0)
                mask = None
            state = self._state_with_room(q, k, v, with_queries="q" in shift.targets)
        q, k, v, state = shift(q, k, v, state=state, mask=mask, **options)
        self.write_shift(state)
        return q, k, v

    def _state_with_room(self, q: Tensor, k: Tensor, v: Tensor, *, with_queries: bool) -> ShiftState:
        """Return the stored state with room for T more raw rows, those of k and v, (B, T, G, D)."""
        state = self._shift_state
        if state is None:
            rows = self.window - 1
            k_rows, v_rows, q_rows = (x.new_zeros(x.shape[0], rows, *x.shape[2:]) for x in (k, v, q))
            state = ShiftState(k_rows, v_rows, rows, q_rows if with_queries else None)
        return ShiftState(state.k, state.v, state.rows + k.shape[1], state.q)

    def write_shift(self, state: ShiftState) -> None:
        self._shift_state = state

    def activate_past_recording(self) -> None:
        self.record_past = True

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self._shift_state = self.document_offset = self.next_token = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select_shift(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        if self.keys is not None:  # type: ignore[attr-defined]
            batch = self.keys.shape[0] // repeats  # type: ignore[attr-defined]
            self._select_shift(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select_shift(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (0 or a negative number, as in transformers).

        Raises:
            RuntimeError: the raw keys and values needed afterwards were dropped (call `activate_past_recording` before
                the tokens are fed), or the crop ends in an earlier document, whose start is not known.
        """
        tokens_to_remove = int(tokens_to_remove)  # a tensor in assisted generation of older transformers
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, got {tokens_to_remove}")
        state, tokens, length = self._shift_state, -tokens_to_remove, int(self.get_seq_length())  # type: ignore[attr-defined]
        if tokens > length:
            raise ValueError(f"cannot crop {tokens} tokens from a cache of {length}")
        if self.document_offset is not None and tokens < length < tokens + int(self.document_offset.max()):
            raise RuntimeError(
                f"cannot crop {tokens} tokens: the last document of a row is shorter, and the start of the one "
                "before it is not stored"
            )
        if state is not None and tokens < length:
            remaining = state.rows - tokens
            if remaining < self.window - 1:
                raise RuntimeError(
                    f"cannot crop {tokens} tokens: the cache holds raw keys and values of the last {state.rows} and "
                    f"needs {self.window - 1} afterwards; they cannot be recovered from shifted ones. Call "
                    "`activate_past_recording()` before tokens that may be taken back"
                )
            state = state.crop(tokens, window=self.window)
            keep = slice(state.rows - (self.window - 1), None)
            q = None if state.q is None else state.q[:, keep]
            state = ShiftState(state.k[:, keep], state.v[:, keep], self.window - 1, q)
        super().crop(tokens_to_remove)  # type: ignore[misc]
        self._shift_state = state if tokens < length else None
        self.document_offset = self.document_offset if tokens < length else None

    def _select_shift(self, indices: Tensor) -> None:
        if self._shift_state is not None:
            self.write_shift(self._shift_state.select(indices))
        if self.document_offset is not None:
            self.document_offset = self.document_offset.index_select(0, indices.to(self.document_offset.device))


class _DynamicShiftCacheLayer(ShiftCacheLayer):
    def reset(self) -> None:
        super().reset()
        self.keys = self.values = None  # before version 5.17 transformers zeroed them and kept their length
        self.is_initialized = False


class ShiftDynamicLayer(_DynamicShiftCacheLayer, DynamicLayer):
    """A cache layer that grows with every token."""


class ShiftSlidingWindowLayer(_DynamicShiftCacheLayer, DynamicSlidingWindowLayer):
    """A cache layer that grows until the attention window is full.

    Attributes:
        to_compact: (B, length), which tokens are real, if the next `update` must move padding to the front; see
            `compact_padding`.
        is_compacted: whether an `update` has moved padding.
    """

    to_compact: Tensor | None = None
    is_compacted: bool = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.to_compact is not None:
            order = self.to_compact[:, -keys.shape[2] :].sort(dim=1, stable=True).indices[:, None, :, None]
            latest = slice(1 - self.sliding_window, None)
            self.keys = keys.gather(2, order.expand_as(keys))[:, :, latest]
            self.values = values.gather(2, order.expand_as(values))[:, :, latest]
            self.to_compact, self.is_compacted = None, True
        if not self.record_past:
            return keys, values
        visible = self.sliding_window - 1 + key_states.shape[-2]  # transformers 5.16 returns all recorded
        return keys[:, :, -visible:], values[:, :, -visible:]

    def crop(self, tokens_to_remove: int) -> None:
        if self.is_compacted and tokens_to_remove and not self.record_past:
            raise RuntimeError(
                f"cannot crop {-tokens_to_remove} tokens: the cache holds padding after a token. Call "
                "`activate_past_recording()` before tokens that may be taken back"
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.to_compact, self.is_compacted = None, False


class StaticShiftCacheLayer(ShiftCacheLayer):
    """A cache layer whose raw rows stay at a fixed address, as compiled decoding and CUDA graphs require.

    Attributes:
        tokens_fed: number of tokens since the start, an integer on the host (`get_seq_length` may return a tensor on
            the device). Compiled calls do not update it.
    """

    is_croppable = False
    tokens_fed: int = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            self.tokens_fed += key_states.shape[2]
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]

    def write_shift(self, state: ShiftState) -> None:
        if self._shift_state is not None:
            self._overwrite(self._shift_state, state)
            return
        self._shift_state = state.clone()
        if not torch.compiler.is_compiling():
            for rows in (self._shift_state.k, self._shift_state.v, self._shift_state.q):
                if rows is not None:
                    torch._dynamo.mark_static_address(rows)

    def reset(self) -> None:
        state = self._shift_state
        super().reset()
        self.tokens_fed = 0
        self._shift_state = state
        if state is not None:
            self.write_shift(state.reset())

    def batch_select_indices(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("a static cache has a fixed batch size: use a DynamicCache to repeat or select rows")

    def crop(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("a static cache cannot take tokens back: use a DynamicCache")

    batch_repeat_interleave = batch_select_indices  # type: ignore[assignment]
    activate_past_recording = crop

    @staticmethod
    def _overwrite(buffers: ShiftState, state: ShiftState) -> None:
        old, new = [buffers.k, buffers.v], [state.k, state.v]
        if buffers.q is not None:
            old.append(buffers.q)
            new.append(cast(Tensor, state.q))
        torch._foreach_copy_(old, new)  # one operation, and one launch on a GPU


class ShiftStaticLayer(StaticShiftCacheLayer, StaticLayer):
    """A buffer for a fixed number of tokens, allocated at the first token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a single token at index `cumulative_length`, without the index range that transformers creates."""
        if key_states.shape[2] != 1 or not self.is_initialized or key_states.is_mps:
            return super().update(key_states, value_states, *args, **kwargs)
        if not torch.compiler.is_compiling():
            self.tokens_fed += 1
        self.keys.index_copy_(2, self.cumulative_length, key_states)
        self.values.index_copy_(2, self.cumulative_length, value_states)
        self.cumulative_length.add_(1)
        return self.keys, self.values  # type: ignore[return-value]


class ShiftStaticSlidingWindowLayer(StaticShiftCacheLayer, StaticSlidingWindowLayer):
    """A buffer for one attention window, or for the whole cache if that is shorter, allocated at the first token.

    Attributes:
        has_gaps: whether padding has followed a token.
    """

    has_gaps: bool = False

    def reset(self) -> None:
        super().reset()
        self.has_gaps = False


KINDS: dict[type, type[ShiftCacheLayer]] = {
    DynamicLayer: ShiftDynamicLayer,
    LinearAttentionAndFullAttentionLayer: ShiftDynamicLayer,
    DynamicSlidingWindowLayer: ShiftSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: ShiftSlidingWindowLayer,
    StaticLayer: ShiftStaticLayer,
    LinearAttentionAndStaticFullAttentionLayer: ShiftStaticLayer,
    StaticSlidingWindowLayer: ShiftStaticSlidingWindowLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer: ShiftStaticSlidingWindowLayer,
}


def with_shift(layer: Any, window: int) -> ShiftCacheLayer:
    """Return an empty layer of the same kind that carries the state of the shift."""
    sizes = {name: getattr(layer, name) for name in ("max_cache_len", "sliding_window") if hasattr(layer, name)}
    if isinstance(layer, StaticSlidingWindowLayer):
        sizes["sliding_window"] = layer.max_cache_len  # transformers keeps only the smaller of both
    new = KINDS[type(layer)](window, **sizes)
    new.record_past = getattr(layer, "record_past", False)
    return new


# A whole cache --------------------------------------------------------------------------------------------------------


def ensure_shift_cache(cache: Cache, config: ShiftConfig) -> None:
    """Replace the layers of an empty transformers cache, in place, by layers that carry the state of the shift.

    These also store where the last document of each row began, which is all that a model without shift needs. A cache
    that has such layers is not changed; nor is, for a model without shift, a cache that cannot have them.

    Raises:
        TypeError: `cache` is not a cache of transformers.
        ValueError: the cache holds tokens without that state, cannot carry it (quantized, offloaded, or of an encoder
            and decoder), was made for another model, or is a static one in a program exported by torch.export.
    """
    if not isinstance(cache, Cache):
        raise TypeError(
            f"{CACHE} must be a Cache of transformers or None, got {type(cache).__name__}; an empty cache is "
            "DynamicCache(config=model.config)"
        )
    window = config.shift_window if config.shift_targets else 1
    refusal = _unsupported_reason(cache, config, window)
    if refusal is not None:
        if config.shift_targets:
            raise ValueError(f"{CACHE} {refusal}")
    elif not _carries_shift(cache):
        if not cache.layers:
            cache.layers.extend(DynamicCache(config=config).layers)
            cache.layer_class_to_replicate = None
        layers: list[Any] = cache.layers
        layers[:] = [with_shift(layer, window) for layer in layers]


def empty_shift_cache(cache: Any) -> bool:
    """Reset a cache with layers that carry the state of the shift; return False, and change nothing, for any other."""
    if not isinstance(cache, Cache) or not _carries_shift(cache):
        return False
    cache.reset()
    return True


def _carries_shift(cache: Cache) -> bool:
    # torch.compile in 2.11 supports the length of a list, not its truth value. Layers are replaced all at once.
    return len(cache.layers) > 0 and isinstance(cache.layers[0], ShiftCacheLayer)


def _unsupported_reason(cache: Cache, config: ShiftConfig, window: int) -> str | None:
    """Return the reason why a cache cannot carry the state of a shift of this window; None if it can."""
    if isinstance(cache, EncoderDecoderCache):
        return "is an EncoderDecoderCache: a model with KV shift has no cross-attention"
    if cache.layers and len(cache.layers) != config.num_hidden_layers:
        return f"has {len(cache.layers)} layers, this model has {config.num_hidden_layers}"
    if is_exporting() and any(isinstance(layer, StaticLayer) for layer in cache.layers):
        return (
            "is a static cache in an exported program (TorchExportableModuleWithStaticCache), which would keep shifted "
            "keys and values between calls, but not the raw ones"
        )
    if _carries_shift(cache):
        made_for = cache.layers[0].window
        if made_for == window:
            return None
        made = f"shift_window={made_for}" if made_for > 1 else "a model without shift"
        return f"was made for {made}, this model has shift_window={config.shift_window}"
    if isinstance(cache, QuantizedCache):
        return "is a QuantizedCache, which has no place for raw keys and values"
    if getattr(cache, "offloading", False):
        return "is offloaded to the CPU, which is not supported for raw keys and values"
    for layer in cache.layers:
        # For chunked prefill, `generate` creates the buffers of a static cache before the first token. A model without
        # shift uses them unchanged.
        if layer.is_initialized and (not config.shift_targets or int(layer.get_seq_length()) > 0):
            return (
                "already holds tokens, but not their raw keys and values, which cannot be recovered; start with an "
                "empty cache, such as DynamicCache(config=model.config). PEFT's prefix tuning gives such a cache: use "
                "prompt tuning or LoRA in its place"
            )
        if type(layer) not in KINDS:
            return f"has a {type(layer).__name__}, which cannot carry raw keys and values"
    return None


def token_count(cache: Cache | None, layer: int = 0) -> int | None:
    """Return the number of tokens in a layer of a cache; None without a cache, or if only a tensor holds the number."""
    if cache is None:
        return None
    held: Any = cache.layers[layer]
    count = held.tokens_fed if isinstance(held, StaticShiftCacheLayer) else held.get_seq_length()
    return count if isinstance(count, int) else None


def require_growth(model: Any, cache: Any, before: int | None, fed: int) -> None:
    """Raise a RuntimeError unless a forward pass has added its `fed` tokens to the cache.

    After a prompt, every layer is checked; after a single token, where host time matters, only the last layer.

    Args:
        model: the decoder.
        cache: the cache after the pass.
        before: `token_count` before the pass; None: nothing is checked.
        fed: number of tokens in the pass.
    """
    if before is None:
        return
    for i in range(len(cache.layers)) if fed > 1 else (len(cache.layers) - 1,):
        held = token_count(cache, i)
        if held != before + fed:
            why = f"This is transformers {transformers.__version__}; {OLDEST} to {NEWEST} are tested"
            if model.training and model.gradient_checkpointing:
                why = "With gradient checkpointing, training has no cache: call model.eval(), or set use_cache=False"
            raise RuntimeError(
                f"{CACHE} must hold {before + fed} tokens after {fed} were added to {before}, but layer {i} holds "
                f"{held}: the cache did not reach the attention of {type(model).__name__}, or stores nothing. {why}"
            )


def compact_padding(cache: Cache, attention_mask: Tensor, not_padding_BT: Tensor | None) -> Tensor | None:
    """Let sliding-window layers move padding to the front where it follows a token, and return the mask after the move.

    A window counts the tokens of a sequence, not the padding between them. Therefore these layers sort the entries that
    they keep of each row: padding first, then tokens. (Not in compiled calls: a traced graph must not depend on data.)

    Args:
        cache: a cache after `ensure_shift_cache`, before the forward pass.
        attention_mask: (B, length), mask of all tokens so far.
        not_padding_BT: which of this call's T tokens are real; None if all are.

    Returns:
        (B, length), which tokens are real, in the order of these layers; None if they have moved no padding.

    Raises:
        ValueError: padding follows a token, and the cache is static and longer than the window.
    """
    sliding: list[Any] = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    if not sliding or not isinstance(sliding[0], ShiftCacheLayer):
        return None
    is_compacted = getattr(sliding[0], "is_compacted", False)
    fixed = sliding[0].record_past or torch.compiler.is_compiling() or torch.jit.is_tracing()
    if isinstance(sliding[0], ShiftStaticSlidingWindowLayer):
        if not fixed and not_padding_BT is not None and _gap_begins(attention_mask != 0, not_padding_BT):
            sliding[0].has_gaps = True
        if sliding[0].has_gaps:
            _require_room(cache, sliding[0], attention_mask.shape[1])
        return None
    if not is_compacted and (not_padding_BT is None or fixed):
        return None
    mask = attention_mask != 0
    if is_compacted:
        seen = sliding[0].get_seq_length()
        mask = torch.cat([mask[:, :seen].sort(dim=1).values, mask[:, seen:]], dim=1)
    if not_padding_BT is None or fixed:
        return mask
    if not _gap_begins(mask, not_padding_BT):
        return mask if is_compacted else None
    for layer in sliding:
        layer.to_compact = mask
    return mask


def _gap_begins(mask: Tensor, not_padding_BT: Tensor) -> bool:
    """Return whether padding follows a token in this call: `not_padding_BT` is the end of `mask` (B, length)."""
    latest = mask[:, max(mask.shape[1] - not_padding_BT.shape[1] - 1, 0) :]
    return bool((latest[:, :-1] & ~latest[:, 1:]).any())


def counts_padding(cache: Cache, length: int) -> bool:
    """Return whether sliding-window layers of a compiled call count padding between two of `length` positions.

    They do if the window can exclude any, as compiled calls do not sort entries; see `compact_padding`.
    """
    layer: Any = next((layer for layer in cache.layers if getattr(layer, "is_sliding", False)), None)
    if isinstance(layer, ShiftStaticSlidingWindowLayer):
        return _excludes(cache, layer, length)
    return isinstance(layer, ShiftCacheLayer) and not layer.is_compacted and length > layer.sliding_window


def _require_room(cache: Cache, layer: ShiftStaticSlidingWindowLayer, length: int) -> None:
    """Raise a ValueError if the window can exclude any of `length` positions: it would count padding among them."""
    if _excludes(cache, layer, length):
        raise ValueError(
            "attention_mask must be padded on the left with a static cache that is longer than the sliding window, "
            "which would count padding after a token: use a DynamicCache"
        )


def _excludes(cache: Cache, layer: ShiftStaticSlidingWindowLayer, length: int) -> bool:
    longest = max(layer.max_cache_len for layer in cache.layers)  # type: ignore[attr-defined]
    return max(longest, length) > layer.max_cache_len


def stored_document_offset(cache: Cache) -> Tensor | None:
    """Return the offset that `store_document_offset` stored, (B,); None if each row holds one document."""
    layers = getattr(cache, "layers", None)
    return getattr(layers[0], "document_offset", None) if layers else None


def store_document_offset(cache: Cache, offset: Tensor, *, is_named: bool = True) -> None:
    """Store the index of the first token of each row's last document, (B,), for the next tokens.

    Args:
        is_named: whether the call named documents, so that there are some. A program that is exported cannot look for
            them in position_ids. It takes and returns caches without offsets, and raises an error if there are any.
    """
    if not _carries_shift(cache):
        raise ValueError(
            f"{CACHE} cannot keep where the last of several documents in a row begins, which the next tokens need: use "
            "a DynamicCache or StaticCache that is empty at first, and neither quantized nor offloaded"
        )
    if is_exporting() and not is_named and stored_document_offset(cache) is None:
        message = "position_ids must not restart within a row of an exported program with a cache; use seq_idx"
        torch.ops.aten._assert_async.msg((offset == 0).all(), message)
        return
    for layer in cache.layers:
        layer.document_offset = offset  # type: ignore[attr-defined]


def check_recording(
    cache: Cache, not_padding_BT: Tensor | None, attention_mask: Tensor | None, seq_idx: Tensor | None
) -> None:
    """Raise a ValueError for inputs that `crop`, which counts positions, could not remove from a recording cache.

    Args:
        cache: a cache after `ensure_shift_cache`.
        not_padding_BT: which of this call's tokens are real; None if all are.
        attention_mask: (B, length), mask of all tokens so far, or a 4D mask; used only if `not_padding_BT` is given.
        seq_idx: document numbers of this call's tokens; None if every row is one document.
    """
    recording = [layer for layer in cache.layers if isinstance(layer, ShiftCacheLayer) and layer.record_past]
    if not recording:
        return
    if seq_idx is not None:
        raise ValueError("a cache that records its past for `crop` cannot hold several documents in a row")
    if not_padding_BT is not None and isinstance(attention_mask, Tensor) and recording[0].window > 1:
        end = recording[0].get_seq_length() + not_padding_BT.shape[1]
        of_tokens = attention_mask[:, :end] if attention_mask.ndim == 2 else not_padding_BT
        begun = of_tokens.cumsum(1)[:, -not_padding_BT.shape[1] :] > 0
        if (begun & ~not_padding_BT).any():
            raise ValueError(
                "attention_mask must be padded on the left for a cache that records its past for `crop`; it has "
                "padding after a token"
            )
