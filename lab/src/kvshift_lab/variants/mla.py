"""Multi-head latent attention (MLA), which computes the keys and values of all heads from one small latent per token.

    c = RMSNorm((W_a x)[: rank]),  r = rotate((W_a x)[rank :])         one rotated key r for all heads
    k_h = (W_b,h c, r),  v_h = W'_b,h c,  q_h = (q_nope, rotate(q_rope)) of W_q x
    softmax(q_h . k_h / sqrt(nope + rope)) v_h

The cache holds c and r, from which every call recomputes the keys and values of all positions. Queries are not
compressed. QK-norm is not supported and `qk_norm` is ignored: the norm would need the keys before they are computed.
Each query head has its own keys and values, and `num_key_value_heads` is ignored. At the paper's 0.2B, the rank is 256,
and 32 of a head's 64 dimensions are rotated.

The hard shift of "mla-kv-shift" gives head 0 the unrotated key, and head 1 the value, of the previous token:

    k_0[t] = (W_b,0 c[t-1], r[t]),  v_1[t] = W'_b,1 c[t-1]             0 where a document begins

Source: DeepSeek-AI, DeepSeek-V2 (2024), section 2.1; modules have their names in transformers. Sizes and hard shift:
the KV-shift paper, appendix J, which does not specify the size of values, whether heads share r, or the norm of c.
These are as in DeepSeek-V2 here, and fields select the other choices.

Shapes: B batch, T positions of this call, K cached positions, H heads.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from kvshift import ShiftState, kv_shift
from kvshift.models.extending import KVShiftLlamaAttention, Rotary, apply_rotary
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.variants.model_classes import NamedConfig
from kvshift_lab.variants.variant import ModelVariant


@strict
class MLALlamaConfig(NamedConfig, KVShiftLlamaConfig):
    """The configuration of an `MLALlamaForCausalLM`.

    It has the fields of `KVShiftLlamaConfig`, of which `num_key_value_heads` and `qk_norm` are ignored, and:

    Args:
        kv_lora_rank: size of the latent; None for a third of hidden_size.
        qk_rope_head_dim: number of rotated dimensions of each query and key; None for half of head_dim.
        qk_nope_head_dim: number of dimensions that are not rotated; None for the rest of head_dim.
        v_head_dim: size of values; None for head_dim.
        shared_rope_key: whether all heads share one rotated key, or each has its own.
        latent_norm: whether to apply an RMSNorm to the latent.
        hard_shift: whether to apply the hard shift above, which needs at least two heads.
        shift_rope: whether head 0 also takes the rotated key of the previous token, rotated to this token's position.
    """

    model_type = "kvshift_mla_llama"
    loaded_by: ClassVar[str] = "kvshift_lab.variants.mla.MLALlamaForCausalLM"

    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None
    shared_rope_key: bool = True
    latent_norm: bool = True
    hard_shift: bool = False
    shift_rope: bool = False


class _LatentShift(nn.Module):
    """Replaces the `KVShift` of an attention: with k = (c, a) and v = (r, b), shifts a and b and rotates q and r.

    a contains what head 0 takes from the previous token: its key and, with `shift_rope`, its part of r, which is
    rotated after the shift. b contains the value of head 1. Both are empty without the hard shift.
    """

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.targets = ("k", "v") if sizes.shifts else ()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotary: Rotary,
        norms: None = None,
        keep_state: bool = True,
        **boundaries: Any,
    ) -> tuple[Tensor, Tensor, Tensor, ShiftState | None]:
        """See `KVShift.forward`; norms are ignored, and `boundaries` is passed on to `kv_shift`."""
        sizes, new_state = self.sizes, None
        if self.targets:
            before_12 = torch.tensor([[0.0, 1.0]], device=k.device)
            k_hat, v_hat, new_state = kv_shift(k, v, before_12, before_12, **boundaries)
            k = torch.cat([k[..., : sizes.rank], k_hat[..., sizes.rank :]], dim=-1)
            v = torch.cat([v[..., : sizes.keys_rope], v_hat[..., sizes.keys_rope :]], dim=-1)
        nope, rope = q.split([sizes.nope, sizes.rope], dim=-1)
        q = torch.cat([nope, apply_rotary(rope, rotary)], dim=-1)
        r, b = v.split([sizes.keys_rope, v.shape[-1] - sizes.keys_rope], dim=-1)
        r = apply_rotary(r.unflatten(-1, (-1, sizes.rope)).squeeze(2), rotary).flatten(2).unsqueeze(2)
        if sizes.shifts_rope:
            k, rope = k.split([sizes.rank + sizes.nope, sizes.rope], dim=-1)
            k = torch.cat([k, apply_rotary(rope, rotary)], dim=-1)
        return q, k, torch.cat([r, b], dim=-1), new_state if keep_state else None


class _Sizes:
    """The sizes of an attention, derived from the fields of a configuration."""

    def __init__(self, config: MLALlamaConfig) -> None:
        head_dim = cast(int, config.head_dim)
        self.heads = config.num_attention_heads
        self.rank = config.kv_lora_rank or config.hidden_size // 3
        self.rope = config.qk_rope_head_dim or head_dim // 2
        self.nope = config.qk_nope_head_dim or head_dim - self.rope
        self.value = config.v_head_dim or head_dim
        self.keys_rope = self.rope * (1 if config.shared_rope_key else self.heads)
        self.shifts, self.shifts_rope = config.hard_shift, config.hard_shift and config.shift_rope
        if self.rope % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.rope}: by default it is half of head_dim")
        if self.shifts and self.heads < 2:
            raise ValueError(f"num_attention_heads must be 2 or more with hard_shift, got {self.heads}")
        if config.shift_rope and not config.hard_shift:
            raise ValueError("shift_rope must be False without hard_shift, got True")


class _LatentAttention(KVShiftLlamaAttention):
    def __init__(self, config: MLALlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sizes = sizes = _Sizes(config)
        width, bias = config.hidden_size, config.attention_bias
        self.scaling = (sizes.nope + sizes.rope) ** -0.5
        self.num_key_value_groups = 1
        del self.k_proj, self.v_proj
        self.q_proj = nn.Linear(width, sizes.heads * (sizes.nope + sizes.rope), bias=bias)
        self.kv_a_proj_with_mqa = nn.Linear(width, sizes.rank + sizes.keys_rope, bias=bias)
        self.kv_a_layernorm = LlamaRMSNorm(sizes.rank, config.rms_norm_eps) if config.latent_norm else nn.Identity()
        self.kv_b_proj = nn.Linear(sizes.rank, sizes.heads * (sizes.nope + sizes.value), bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.value, width, bias=bias)
        self.shift: Any = _LatentShift(sizes)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of all heads, and the k and v of `_LatentShift`."""
        sizes = self.sizes
        query = self.q_proj(hidden_states).unflatten(-1, (sizes.heads, -1))
        latent, r = self.kv_a_proj_with_mqa(hidden_states).unsqueeze(2).split([sizes.rank, sizes.keys_rope], dim=-1)
        latent = self.kv_a_layernorm(latent).to(r.dtype)  # autocast leaves norms in float32
        if not sizes.shifts:
            return query, latent, r
        key, value = self._decompress(latent)
        of_head_0 = [key[:, :, :1], *([r[..., : sizes.rope]] if sizes.shifts_rope else [])]
        return query, torch.cat([latent, *of_head_0], dim=-1), torch.cat([r, value[:, :, 1:2]], dim=-1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        key, value = self._of_all_heads(key.transpose(1, 2), value.transpose(1, 2))
        return super().attend(query, key.transpose(1, 2), value.transpose(1, 2), **options)

    def _decompress(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return unrotated keys and values of all heads, (B, K, H, ...), given latents (B, K, 1, rank)."""
        sizes = self.sizes
        up = self.kv_b_proj(latent.squeeze(2)).unflatten(-1, (sizes.heads, -1))
        key, value = up.split([sizes.nope, sizes.value], dim=-1)
        return key, value

    def _of_all_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all heads, (B, K, H, ...), given the k and v of `_LatentShift`, cached or new."""
        sizes = self.sizes
        latent, key_0 = k.split([sizes.rank, k.shape[-1] - sizes.rank], dim=-1)
        r, value_1 = v.split([sizes.keys_rope, v.shape[-1] - sizes.keys_rope], dim=-1)
        nope, value = self._decompress(latent)
        rope = r.squeeze(2).unflatten(-1, (-1, sizes.rope)).expand(-1, -1, sizes.heads, -1)
        if sizes.shifts:
            nope = torch.cat([key_0[..., : sizes.nope], nope[:, :, 1:]], dim=2)
            value = torch.cat([value[:, :, :1], value_1, value[:, :, 2:]], dim=2)
        if sizes.shifts_rope:
            rope = torch.cat([key_0[..., sizes.nope :], rope[:, :, 1:]], dim=2)
        return torch.cat([nope, rope], dim=-1), value


class MLALlamaForCausalLM(KVShiftLlamaForCausalLM):
    """`KVShiftLlamaForCausalLM` with multi-head latent attention."""

    config: MLALlamaConfig
    config_class = MLALlamaConfig

    def __init__(self, config: MLALlamaConfig) -> None:
        # With these fields, the cache carries a state as it does for KV shift.
        config.shift_targets = ["k", "v"] if config.hard_shift else []
        config.shift_window, config.qk_norm = 2, False
        super().__init__(config)
        rotated = deepcopy(config)
        rotated.head_dim = _Sizes(config).rope
        self.model.rotary_emb = LlamaRotaryEmbedding(rotated)
        layers: Any = self.model.layers
        for index, layer in enumerate(layers):
            layer.self_attn = _LatentAttention(config, index)
        self.post_init()


_MODELS = {KVShiftLlamaConfig: MLALlamaForCausalLM}

MODEL_VARIANTS = (
    ModelVariant(name="mla", models=_MODELS),
    # The hard shift of a key and a value has no parameters.
    ModelVariant(name="mla-kv-shift", models=_MODELS, fields={"hard_shift": True}),
)
