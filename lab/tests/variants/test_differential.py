"""Differential attention: its parts, and a slow loop of its formula for `test_attention_mixin.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.models.llama import KVShiftLlamaConfig
from kvshift_lab.variants.building import build_model, describe
from kvshift_lab.variants.by_name import find_variant, with_variant
from kvshift_lab.variants.differential import Differential, PairNorm
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.small_gpt2 import GPT2Options
from tests.models.llama import checks
from tests.models.llama.reference import reference_logits
from tests.models.llama.tiny import PAD, SIZES, randomize

from .slow_attention import attended, linear, mixed, rms_norm, rotated

NAMES = ("differential", "differential-wide", "differential-kv-shift")
OPTIONS = [(name, qk_norm) for name in NAMES for qk_norm in (False, True)]


def by_loop(layer: Mapping[str, Tensor], config: Any, x_TE: Tensor, number: int) -> Tensor:
    """Compute the attention of one layer, one head after the other, with each pair of halves separated."""
    wide = 2 if config.halve_heads else 1
    heads, kv_heads, size = (
        config.num_attention_heads // wide,
        config.num_key_value_heads // wide,
        wide * config.head_dim,
    )
    base, quarter = config.rope_parameters["rope_theta"], size // 4
    halves = [
        [*range(start, start + quarter), *range(start + 2 * quarter, start + 3 * quarter)] for start in (0, quarter)
    ]
    q, k, v = (linear(layer, f"{letter}_proj", x_TE).view(len(x_TE), -1, size) for letter in "qkv")

    def finished(x_TD: Tensor, name: str) -> Tensor:
        if config.qk_norm:
            x_TD = rms_norm(x_TD, layer[f"self_attn.{name}_norm.weight"], config.rms_norm_eps)
        return rotated(x_TD, base)

    scales = [layer[f"self_attn.differential.lambda_{name}"] for name in ("q1", "k1", "q2", "k2")]
    start = 0.8 - 0.6 * math.exp(-0.3 * number)
    scale = (scales[0] @ scales[1]).exp() - (scales[2] @ scales[3]).exp() + start
    outputs = []
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        key, value = k[:, kv_head], v[:, kv_head]
        if config.shift_targets:
            key = mixed(key, *layer["self_attn.shift.alpha"][kv_head])
            value = mixed(value, *layer["self_attn.shift.beta"][kv_head])
        first, second = (
            attended(finished(q[:, head][:, half], "q"), finished(key[:, half], "k"), value) for half in halves
        )
        gain = layer["self_attn.differential.norm.weight"]
        outputs.append((1 - start) * rms_norm(first - scale * second, gain, 1e-5))
    return linear(layer, "o_proj", torch.cat(outputs, dim=1))


for each in NAMES:
    checks.REFERENCES[f"kvshift_{each.replace('-', '_')}_llama"] = partial(reference_logits, attention=by_loop)


def tiny(name: str, qk_norm: bool, *, seed: int = 0, attention: str = "sdpa") -> Any:
    variant: Any = find_variant(name)
    model_class = variant.models[KVShiftLlamaConfig]
    targets = ("k", "v") if "shift" in name else ()
    sizes = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
    config = model_class.config_class(**sizes, qk_norm=qk_norm, shift_targets=targets)
    config._attn_implementation = attention
    model = model_class(config)
    randomize(model, seed)
    model.generation_config.pad_token_id = PAD
    return model.double().eval()


def test_parts_in_bfloat16_round_once() -> None:
    torch.manual_seed(0)
    for module, x in ((Differential(12, 1), torch.randn(3, 5, 14, 12)), (PairNorm(12, 1e-6), torch.randn(3, 5, 7, 12))):
        randomize(module)
        rounded, x_rounded = module.to(torch.bfloat16), x.to(torch.bfloat16)
        got = rounded(x_rounded)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), rounded.double()(x_rounded.double()), rtol=2**-8, atol=1e-6)


def test_start_values() -> None:
    starts = [Differential(64, layer).lambda_init for layer in (0, 1, 11)]
    torch.testing.assert_close(starts, [0.2, 0.8 - 0.6 * 0.7408182206817179, 0.8 - 0.6 * 0.036883167401240015])
    torch.manual_seed(0)
    layer = Differential(20_000, 0)
    for vector in (layer.lambda_q1, layer.lambda_k1, layer.lambda_q2, layer.lambda_k2):
        assert vector.shape == (10_000,)
        assert abs(vector.mean().item()) < 0.004
        assert abs(vector.std().item() - 0.1) < 0.003
    assert torch.equal(layer.norm.weight, torch.ones(20_000))


@pytest.mark.parametrize(("name", "added"), [("differential", 192 - 64), ("differential-wide", 384 - 0)])
def test_parameters_of_the_papers_size(name: str, added: int) -> None:
    """Each layer adds four vectors and a gain, 4d + 2d; its QK-norm has gains of 2d instead of 2 x 64."""
    size = describe(with_variant(ModelConfig(size="0.2B"), name), vocab_size=50_304, length=9)
    assert find_variant(name).added_parameters(size) == 12 * added
    size.qk_norm = False
    assert find_variant(name).added_parameters(size) == 12 * 6 * (32 if name == "differential" else 64)


def test_on_the_small_gpt2() -> None:
    """The formula is the same with one matrix for queries, keys and values, and no rotary embedding."""
    options = with_variant(GPT2Options(width=24, heads=3, layers=1, dropout=0.0), "differential")
    model: Any = build_model(describe(options, vocab_size=23, length=9), seed=0, variant="differential").double()
    randomize(model)
    attention, seen = model.transformer.h[0].attn, {}
    attention.register_forward_hook(lambda _, given, out: seen.update(x=given[0], y=out[0]))
    model(torch.arange(9).unsqueeze(0))
    weights = {key: tensor.detach() for key, tensor in attention.state_dict().items()}
    q, k, v = (seen["x"][0] @ weights["c_attn.weight"] + weights["c_attn.bias"]).view(9, 3, 3, 8).unbind(1)
    scales = [weights[f"differential.lambda_{name}"] for name in ("q1", "k1", "q2", "k2")]
    scale = (scales[0] @ scales[1]).exp() - (scales[2] @ scales[3]).exp() + 0.2
    outputs = []
    for head in range(3):
        first, second = (
            attended(q[:, head, half], k[:, head, half], v[:, head]) for half in ([0, 1, 4, 5], [2, 3, 6, 7])
        )
        outputs.append(0.8 * rms_norm(first - scale * second, weights["differential.norm.weight"], 1e-5))
    expected = torch.cat(outputs, dim=1) @ weights["c_proj.weight"] + weights["c_proj.bias"]
    torch.testing.assert_close(seen["y"][0], expected, rtol=0, atol=1e-12)
