"""Llama with KV shift for mlx-lm. `kvshift export --format mlx` copies this file, which requires only mlx-lm.

    k_hat[t] = alpha[:, 0] * k[t] + alpha[:, 1] * k[t-1] + ...        v_hat with beta

Shapes: B batch, T positions of this call, H query heads, G KV heads, D head size, W window.
"""

# pyright: reportMissingImports=false
# Annotations are not postponed: mlx-lm runs this file outside of sys.modules, where dataclasses cannot resolve them.

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache


@dataclass
class ModelArgs(llama.ModelArgs):
    """The fields that are read from config.json."""

    rope_parameters: dict[str, Any] | None = None
    shift_targets: tuple[str, ...] = ("k", "v")
    shift_window: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        rope = dict(self.rope_parameters or {})
        self.rope_theta = rope.pop("rope_theta", self.rope_theta)
        self.rope_scaling = None if rope.get("rope_type", "default") == "default" else rope


class Shift(nn.Module):
    """Shifts keys and values with the coefficients alpha and beta, each (G, W); only shifted targets have them."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        for name, target in (("alpha", "k"), ("beta", "v")):
            if target in args.shift_targets:
                setattr(self, name, mx.zeros((args.num_key_value_heads, args.shift_window)))

    def __call__(self, keys: mx.array, values: mx.array, raw: ArraysCache | None) -> tuple[mx.array, mx.array]:
        """Shift keys and values (B, T, G, D), continuing from the last W - 1 raw ones in `raw`, which is updated."""
        if raw is not None and (real := raw.make_mask(keys.shape[1])) is not None:  # the batch is padded
            keys, values = (mx.where(real[..., None, None], x, 0) for x in (keys, values))
        if "alpha" in self:
            keys = _mix(keys, self.alpha, raw, 0)
        if "beta" in self:
            values = _mix(values, self.beta, raw, -1)
        if raw is not None:
            raw.advance(keys.shape[1])
        return keys, values


def _mix(x: mx.array, coefficients: mx.array, raw: ArraysCache | None, slot: int) -> mx.array:
    """Mix each position of x (B, T, G, D) with the W - 1 before it by the coefficients (G, W), in float32."""
    (batch, length, *head), window = x.shape, coefficients.shape[1]
    before = None if raw is None else raw[slot]
    rows = mx.concatenate([mx.zeros((batch, window - 1, *head), x.dtype) if before is None else before, x], axis=1)
    if raw is not None:
        ends = mx.full((batch,), length) if raw.lengths is None else mx.clip(raw.lengths, 0, length)
        last = (ends[:, None] + mx.arange(window - 1))[..., None, None]
        raw[slot] = mx.take_along_axis(rows, last, axis=1)
    mixed = coefficients[:, 0, None] * x
    for lag in range(1, window):
        mixed = mixed + coefficients[:, lag, None] * rows[:, window - 1 - lag :][:, :length]
    return mixed.astype(x.dtype)


class Attention(llama.Attention):
    """Llama's attention over shifted keys and values."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.shift = Shift(args)

    def __call__(self, x: mx.array, mask: Any = None, cache: CacheList | None = None) -> mx.array:
        kept, raw = (None, None) if cache is None else (cache[0], cache[1])
        heads = (*x.shape[:2], -1, self.head_dim)
        queries, keys, values = (project(x).reshape(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values = (y.transpose(0, 2, 1, 3) for y in (queries, *self.shift(keys, values, raw)))
        offset = 0 if kept is None else kept.offset
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if kept is not None:
            keys, values = kept.update_and_fetch(keys, values)
        output = scaled_dot_product_attention(queries, keys, values, cache=kept, scale=self.scale, mask=mask)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


class LlamaModel(llama.LlamaModel):
    """The decoder without the language modeling head."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        for layer in self.layers:
            layer.self_attn = Attention(args)

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        hidden = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        caches: list[Any] = [None] * len(self.layers) if cache is None else cache
        mask = create_attention_mask(hidden, None if caches[0] is None else caches[0][0])
        for layer, one in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, mask, cache=one)
        return self.norm(hidden)


class Model(llama.Model):
    """The causal language model that mlx-lm loads."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.model = LlamaModel(args)

    def make_cache(self) -> list[CacheList]:
        """Create a cache of keys and values, and of the last raw rows of each shifted target, for each layer."""
        return [CacheList(KVCache(), ArraysCache(len(self.args.shift_targets))) for _ in self.layers]
