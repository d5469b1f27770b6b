"""What our models do to a whole cache: make it one that carries the state of the shift, and what it keeps of documents.

`ensure_shift_cache` puts the layers of `kvshift.models.cache_layers` in place of transformers' own in an empty cache.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    QuantizedCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from kvshift.models.cache_layers import KINDS, ShiftCacheLayer, StaticShiftCacheLayer, with_shift
from kvshift.models.configuration import ShiftConfig
from kvshift.models.versions import CACHE, NEWEST, OLDEST
from kvshift.ops.torch_ops import is_exporting


def ensure_shift_cache(cache: Cache, config: ShiftConfig) -> None:
    """Make the layers of an empty cache of transformers, in place, ones that carry the state of the shift.

    They also keep where the last document of each sequence began, which is all that a model without shift needs. A
    cache that was made so already is left as it is; for a model without shift, any other that cannot be.

    Raises:
        TypeError: it is no cache.
        ValueError: the cache holds tokens without that state, or cannot carry it (quantized, offloaded, or of an
            encoder and decoder), or is a static one in a program that torch.export makes.
    """
    if not isinstance(cache, Cache):
        raise TypeError(
            f"{CACHE} must be a Cache of transformers or None, got {type(cache).__name__}; an empty one is "
            "DynamicCache(config=model.config)"
        )
    window = config.shift_window if config.shift_targets else 1
    refusal = _refusal(cache, config, window)
    if refusal is not None:
        if config.shift_targets:
            raise ValueError(f"{CACHE} {refusal}")
    elif not _carries_shift(cache):
        if not cache.layers:
            cache.layers.extend(DynamicCache(config=config).layers)
            cache.layer_class_to_replicate = None
        layers: list[Any] = cache.layers
        layers[:] = [with_shift(layer, window) for layer in layers]


def _carries_shift(cache: Cache) -> bool:
    # torch.compile of 2.11 knows the length of a list, not its truth. Where the first is ours, they all are.
    return len(cache.layers) > 0 and isinstance(cache.layers[0], ShiftCacheLayer)


def _refusal(cache: Cache, config: ShiftConfig, window: int) -> str | None:
    """Why a cache cannot carry the state of a shift of this window; None if it can."""
    if isinstance(cache, EncoderDecoderCache):
        return "is an EncoderDecoderCache: a model with KV shift has no cross-attention"
    if cache.layers and len(cache.layers) != config.num_hidden_layers:
        return f"has {len(cache.layers)} layers, this model has {config.num_hidden_layers}"
    if is_exporting() and any(isinstance(layer, StaticLayer) for layer in cache.layers):
        return (
            "is a static cache in a program that torch.export makes (TorchExportableModuleWithStaticCache): it would "
            "keep keys and values from call to call, but not the raw ones of the shift"
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
        return "is offloaded to the CPU, which is not supported: raw keys and values stay"
    for layer in cache.layers:
        if layer.is_initialized:
            return (
                "already holds tokens, but not their raw keys and values, which cannot be recovered; start with an "
                "empty cache, such as DynamicCache(config=model.config)"
            )
        if type(layer) not in KINDS:
            return f"has a {type(layer).__name__}, which cannot carry raw keys and values"
    return None


def token_count(cache: Cache | None) -> int | None:
    """Tokens in the first layer of a cache, an integer of the host; None without a cache, or such an integer.

    A compiled call, which would be compiled anew for every count, has none, nor do static layers of transformers.
    """
    return None if cache is None or torch.compiler.is_compiling() else _tokens_in(cache.layers[0])


def require_growth(model: Any, cache: Any, before: int | None, fed: int) -> None:
    """Raise a RuntimeError unless a forward pass has put the `fed` tokens into the cache.

    Every layer is asked after a prompt; after a single token, for which the time of the host counts, the last alone.

    Args:
        model: a decoder.
        cache: after the pass.
        before: `token_count` before the pass; None: nothing is required.
        fed: tokens of the pass.
    """
    if before is None:
        return
    for i in range(len(cache.layers)) if fed > 1 else (len(cache.layers) - 1,):
        found = _tokens_in(cache.layers[i])
        if found != before + fed:
            why = f"This is transformers {transformers.__version__}; {OLDEST} to {NEWEST} are tested"
            if model.training and model.gradient_checkpointing:
                why = "Layers that are checkpointed in training get no cache: call model.eval(), or set use_cache=False"
            raise RuntimeError(
                f"{CACHE} must hold {before + fed} tokens after {fed} were added to {before}, but layer {i} holds "
                f"{found}: the cache did not reach the attention of {type(model).__name__}, or keeps nothing. {why}"
            )


def _tokens_in(layer: Any) -> int | None:
    if isinstance(layer, StaticShiftCacheLayer):
        return layer.tokens_fed
    length = layer.get_seq_length()
    return length if isinstance(length, int) else None


def compact_padding(cache: Cache, attention_mask: Tensor, real_BT: Tensor | None) -> Tensor | None:
    """Have layers of a sliding window keep tokens alone where padding follows them, and say where they hold them.

    A window counts tokens of the sequence, not the padding between them. So these layers put what they keep of each row
    in order: padding first, then the tokens. (Not in a compiled call: a traced graph must not depend on data.)

    Args:
        cache: adopted, before the call.
        attention_mask: of all tokens so far, (B, length).
        real_BT: which of this call's T tokens are real; None if all are.

    Returns:
        (B, length), which tokens are real, in the order of these layers; None where no padding follows a token.

    Raises:
        ValueError: padding follows a token, and the cache is static.
    """
    sliding: list[Any] = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    if not sliding or not isinstance(sliding[0], ShiftCacheLayer):
        return None
    is_closed = getattr(sliding[0], "is_closed", False)
    may_close = not (sliding[0].record_past or torch.compiler.is_compiling() or torch.jit.is_tracing())
    if not is_closed and (real_BT is None or not may_close):
        return None
    seen, mask = sliding[0].get_seq_length(), attention_mask != 0
    if is_closed:
        mask = torch.cat([mask[:, :seen].sort(dim=1).values, mask[:, seen:]], dim=1)
    if real_BT is not None and may_close:
        latest = mask[:, max(mask.shape[1] - real_BT.shape[1] - 1, 0) :]
        if (latest[:, :-1] & ~latest[:, 1:]).any():
            if isinstance(sliding[0], StaticSlidingWindowLayer):
                raise ValueError(
                    "attention_mask must be padded on the left for a static cache of a sliding window, which would "
                    "count the padding behind a token: give a DynamicCache"
                )
            for layer in sliding:
                layer.closing = mask
            return mask
    return mask if is_closed else None


def kept_document_start(cache: Cache) -> Tensor | None:
    """What `keep_document_start` kept, (B,); None where each row holds one document."""
    return getattr(cache.layers[0], "document_start", None) if cache.layers else None


def keep_document_start(cache: Cache, start: Tensor) -> None:
    """Keep where the last document of each row began, (B,), for the tokens that come next."""
    if not _carries_shift(cache):
        raise ValueError(
            f"{CACHE} cannot keep where the last of several documents in a row began, for the tokens that come "
            "next: give a DynamicCache or StaticCache, neither quantized nor offloaded, that was empty at first"
        )
    for layer in cache.layers:
        layer.document_start = start  # type: ignore[attr-defined]


def check_recording(
    cache: Cache, real_BT: Tensor | None, attention_mask: Tensor | None, seq_idx: Tensor | None
) -> None:
    """Refuse what a cache that records its past could not take back by positions, as `crop` does.

    Args:
        cache: adopted.
        real_BT: which of this call's tokens are real; None if all are.
        attention_mask: of all tokens so far, (B, length), or of pairs; looked at only if `real_BT` is given.
        seq_idx: documents of this call's tokens; None if every row is one.
    """
    recording = [layer for layer in cache.layers if isinstance(layer, ShiftCacheLayer) and layer.record_past]
    if not recording:
        return
    if seq_idx is not None:
        raise ValueError("a cache that records its past for `crop` cannot hold several documents in a row")
    if real_BT is not None and isinstance(attention_mask, Tensor) and recording[0].window > 1:
        of_tokens = attention_mask if attention_mask.ndim == 2 else real_BT
        begun = of_tokens.cumsum(1)[:, -real_BT.shape[1] :] > 0
        if (begun & ~real_BT).any():
            raise ValueError(
                "attention_mask must be padded on the left for a cache that records its past for `crop`; it has "
                "padding after a token"
            )
