"""MLA: a slow loop of its formula for `test_attention_mixin.py`, transformers' DeepSeek-V2, and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DynamicCache
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from kvshift.models.extending import CACHE
from kvshift_lab.variants.building import describe
from kvshift_lab.variants.by_name import find_variant, with_variant
from kvshift_lab.variants.mla import MLALlamaConfig, MLALlamaForCausalLM
from kvshift_lab.variants.model_config import ModelConfig
from tests.models.llama import checks
from tests.models.llama.reference import reference_logits
from tests.models.llama.tiny import PAD, SIZES, random_tokens, randomize, tiny_model

from .slow_attention import attended, linear, mixed, rms_norm, rotated

FIELDS = {"kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 7}
FORMS: dict[str, dict[str, Any]] = {
    "mla": {},
    "a rotated key for each head": {"shared_rope_key": False},
    "without norm": {"latent_norm": False},
    "shifted": {"hard_shift": True},
    "shifted, rotated key too": {"hard_shift": True, "shift_rope": True},
    "shifted, a rotated key for each head, too": {"hard_shift": True, "shift_rope": True, "shared_rope_key": False},
}
both = pytest.mark.parametrize("form", ["mla", "shifted", "shifted, rotated key too"])


def by_loop(layer: Mapping[str, Tensor], config: Any, x_TE: Tensor, _: int) -> Tensor:
    """Compute the attention of one layer, head by head."""
    rank, nope, rope = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    base, heads = config.rope_parameters["rope_theta"], config.num_attention_heads
    down = linear(layer, "kv_a_proj_with_mqa", x_TE)
    latent, rotary = down[:, :rank], down[:, rank:]
    if config.latent_norm:
        latent = rms_norm(latent, layer["self_attn.kv_a_layernorm.weight"], config.rms_norm_eps)
    up = (latent @ layer["self_attn.kv_b_proj.weight"].T).view(len(x_TE), heads, -1)
    queries = linear(layer, "q_proj", x_TE).view(len(x_TE), heads, -1)
    outputs = []
    for head in range(heads):
        key, value = up[:, head, :nope], up[:, head, nope:]
        own = rotary if config.shared_rope_key else rotary[:, head * rope : (head + 1) * rope]
        if config.hard_shift and head == 0:
            key = mixed(key, 0.0, 1.0)
            own = mixed(own, 0.0, 1.0) if config.shift_rope else own
        if config.hard_shift and head == 1:
            value = mixed(value, 0.0, 1.0)
        query = torch.cat([queries[:, head, :nope], rotated(queries[:, head, nope:], base)], dim=1)
        outputs.append(attended(query, torch.cat([key, rotated(own, base)], dim=1), value))
    return linear(layer, "o_proj", torch.cat(outputs, dim=1))


checks.REFERENCES[MLALlamaConfig.model_type] = partial(reference_logits, attention=by_loop)


def tiny(form: str, *, attention: str = "sdpa") -> Any:
    config = MLALlamaConfig(**{**SIZES, **FIELDS, **FORMS[form]})
    config._attn_implementation = attention
    model = MLALlamaForCausalLM(config)
    randomize(model)
    model.generation_config.pad_token_id = PAD
    return model.double().eval()


@pytest.mark.parametrize(("form", "numbers"), [("mla", 9 + 4), ("shifted", 9 + 4 + 5 + 7)])
def test_the_cache_holds_latents(form: str, numbers: int) -> None:
    model, cache = tiny(form), DynamicCache()
    checks.logits_of(model, random_tokens(1, 3), **{CACHE: cache})
    assert all(layer.keys.shape[-1] + layer.values.shape[-1] == numbers for layer in cache.layers)
    assert all(layer.keys.shape[:3] == layer.values.shape[:3] == (1, 1, 3) for layer in cache.layers)


@both
def test_in_bfloat16(form: str) -> None:
    """The distance to double precision with the same rounded weights is at most twice Llama's, over 8 models.

    Before attention, Llama rounds once, to keys and values; here latents are rounded, and then keys and values.
    """
    distances: dict[str, float] = {form: 0.0, "llama": 0.0}
    ids = random_tokens(4, 9)
    for seed in range(8):
        plain = tiny_model(seed=seed, shift_targets=())
        for name, model in ((form, tiny(form)), ("llama", plain)):
            randomize(model.float(), seed)
            rounded = model.to(torch.bfloat16)
            got = checks.logits_of(rounded, ids)
            assert got.dtype == torch.bfloat16
            distances[name] += (got - checks.logits_of(rounded.double(), ids)).square().mean().item()
    assert distances[form] <= 4 * distances["llama"]


@pytest.mark.parametrize("form", ["shifted", "shifted, rotated key too"])
def test_the_hard_shift_moves_bits(form: str) -> None:
    shift: Any = tiny(form).model.layers[0].self_attn.shift
    chance = torch.Generator().manual_seed(0)
    widths = (9, 9 + 5 + (4 if shift.sizes.shifts_rope else 0), 4 + 7)
    q, k, v = (torch.randn(2, 6, 1, width, generator=chance).to(torch.bfloat16) for width in widths)
    still = torch.ones(1, 6, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 6, 1, 4, dtype=torch.bfloat16)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, -1)
    _, k_hat, v_hat, _ = shift(q, k, v, rotary=still, seq_idx=documents)
    assert torch.equal(k_hat[..., :9], k[..., :9])
    assert torch.equal(v_hat[..., :4], v[..., :4])
    for got, raw in ((k_hat[..., 9:], k[..., 9:]), (v_hat[..., 4:], v[..., 4:])):
        assert torch.equal(got[:, [1, 2, 4, 5]], raw[:, [0, 1, 3, 4]])
        assert not got[:, [0, 3]].any()


def test_it_is_deepseeks() -> None:
    """Transformers computes the same with the same weights, where neighbouring dimensions rotate instead of halves."""
    fields = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}  # even, for DeepSeek
    config = MLALlamaConfig(**{**SIZES, **fields, "attention_bias": False, "rms_norm_eps": 1e-6})
    model = MLALlamaForCausalLM(config)
    randomize(model)
    ours: Any = model.model.layers[0].self_attn
    heads = SIZES["num_attention_heads"]
    theirs = DeepseekV2Attention(
        DeepseekV2Config(
            hidden_size=42, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=None, **fields
        ),
        0,
    )
    weights = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    neighbours = torch.tensor([0, 2, 1, 3])  # dimension 1 of transformers' 4 is the first of our second half
    down = weights["kv_a_proj_with_mqa.weight"]
    down[10:] = down[10:][neighbours]
    queries = weights["q_proj.weight"].view(heads, 10, -1)
    queries[:, 6:] = queries[:, 6:][:, neighbours]
    theirs.load_state_dict(weights)
    theirs.config._attn_implementation = "eager"
    x, positions = torch.randn(2, 7, 42, generator=torch.Generator().manual_seed(0)), torch.arange(7)
    angles = positions[:, None] / 10_000.0 ** torch.tensor([0.0, 0.5])
    causal = torch.full((7, 7), -torch.inf).triu(1)
    expected, _ = theirs(x, causal, position_embeddings=torch.polar(torch.ones_like(angles), angles).unsqueeze(0))
    seen: dict[str, Tensor] = {}
    ours.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs | {"hidden_states": x}), with_kwargs=True)
    ours.register_forward_hook(lambda module, args, output: seen.update(output=output[0]))
    model(torch.zeros(2, 7, dtype=torch.long), use_cache=False)
    torch.testing.assert_close(seen["output"], expected, rtol=1e-5, atol=1e-5)


def test_parameters_of_the_papers_size() -> None:
    """This is 1.0 % more than vanilla, and 3.3 % with a rotated key for each head; the paper says about 5 %."""
    size = describe(with_variant(ModelConfig(size="0.2B"), "mla"), vocab_size=50_304, length=9)
    vanilla = 2 * (768 * 256 + 256) + 2 * 64  # keys, values, QK-norm
    ours = 768 * (256 + 32) + (256 + 32) + 256 + 256 * 12 * (32 + 64)
    assert find_variant("mla").added_parameters(size) == find_variant("mla-kv-shift").added_parameters(size)
    assert find_variant("mla").added_parameters(size) == 12 * (ours - vanilla)
    assert round(100 * 12 * (ours - vanilla) / 142_600_000, 1) == 1.0
