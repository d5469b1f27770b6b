"""TransformerLens gives the results of the model, and its hooks are in the right places. Needs transformer-lens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvshift import ShiftOptions
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift.models.retrofit import add_kv_shift
from kvshift_lab.run.head_scores import attention_scores, measure_heads, sequences_for
from kvshift_lab.run.repeat_config import RepeatConfig

pytest.importorskip("transformer_lens", reason="needs the package transformer-lens")

from kvshift.integrations.lens.adapters import ADAPTERS, bridge

SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
REPEATS = RepeatConfig(rows=3, length=12)
OTHERS = {
    "Mistral": (MistralForCausalLM, MistralConfig),
    "Qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "Qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
pytestmark = pytest.mark.filterwarnings("default")  # TransformerLens and its imports emit warnings


def make(family: str) -> Any:
    torch.manual_seed(0)
    if family == "Llama":
        model = KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**SIZE, shift_init="uniform"))
    else:
        cls, config = OTHERS[family]
        heads = {} if family == "Qwen2" else {"head_dim": 16}
        model = add_kv_shift(cls(config(**SIZE, **heads)), ShiftOptions(init="uniform"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and ".shift." not in name:
                parameter.normal_(0, 0.2)
    model.set_attn_implementation("eager")
    return model.eval()


@pytest.mark.parametrize("family", ["Llama", *OTHERS])
@torch.no_grad()
def test_it_computes_what_the_model_does(family: str):
    model, ids = make(family), torch.randint(64, (2, 16))
    expected = model(ids, output_attentions=True)
    generated = model.generate(ids[:1], max_new_tokens=6, do_sample=False, eos_token_id=None)
    measured = measure_heads(model, REPEATS)
    repeats = sequences_for(model, REPEATS, window=2)
    coefficients = [{name: torch.tensor(x) for name, x in layer.items()} for layer in measured.coefficients]
    lens = bridge(model)

    logits, cache = lens.run_with_cache(ids)
    torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=1e-5)
    for layer, attention in enumerate(expected.attentions):
        at = f"blocks.{layer}.attn"
        torch.testing.assert_close(cache[f"{at}.hook_pattern"], attention, atol=1e-6, rtol=1e-5)
        for name, coefficient in (("k", "alpha"), ("v", "beta")):
            raw, shifted = cache[f"{at}.hook_{name}"], cache[f"{at}.shift.hook_{name}"]
            assert raw.shape == shifted.shape == (2, 16, 2, 16)
            share = coefficients[layer][coefficient]
            by_hand = share[:, 0, None] * raw
            by_hand[:, 1:] += share[:, 1, None] * raw[:, :-1]
            torch.testing.assert_close(shifted, by_hand, atol=1e-5, rtol=1e-5)
    step = lens.generate(ids[:1], max_new_tokens=6, do_sample=False, verbose=False, stop_at_eos=False)
    assert step.tolist() == generated.tolist()

    _, cache = lens.run_with_cache(repeats)
    scores = [
        head
        for layer, shift in enumerate(measured.coefficients)
        for head in attention_scores(cache[f"blocks.{layer}.attn.hook_pattern"], length=12, layer=layer, **shift)
    ]
    for ours, theirs in zip(measured.heads, scores, strict=True):
        assert theirs.scores == pytest.approx(ours.scores, abs=1e-6)
        assert theirs.alone == pytest.approx(ours.alone, abs=1e-6)


@torch.no_grad()
def test_a_change_of_the_shifted_keys_is_computed_with():
    """A hook that replaces shifted keys by raw keys has the effect of alpha = (1, 0)."""
    model, ids = make("Llama"), torch.randint(64, (2, 16))
    for layer in model.model.layers:
        kept = layer.self_attn.shift.alpha.clone()
        layer.self_attn.shift.alpha.copy_(torch.tensor([[1.0, 0.0]] * 2))
        layer.self_attn.kept = kept
    expected = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.shift.alpha.copy_(layer.self_attn.kept)
    assert not torch.allclose(model(ids).logits, expected, atol=1e-3)
    lens, raw = bridge(model), {}
    hooks = [(f"blocks.{i}.attn.hook_k", lambda keys, hook, i=i: raw.update({i: keys})) for i in range(2)]
    hooks += [(f"blocks.{i}.attn.shift.hook_k", lambda keys, hook, i=i: raw[i]) for i in range(2)]
    torch.testing.assert_close(lens.run_with_hooks(ids, fwd_hooks=hooks), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_folding_a_bias_of_shifted_values_is_refused():
    """TransformerLens folds it by default, as if attention passed it on with weight 1."""
    ids = torch.randint(64, (2, 16))
    for family, biased in (("Qwen2", True), ("Qwen3", False)):
        model = make(family)
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.uniform_(0.5, 1.5)
        expected, lens = model(ids).logits, bridge(model)
        if biased:
            with pytest.raises(ValueError, match="fold_value_biases must be False, got True"):
                lens.enable_compatibility_mode(disable_warnings=True)
        # Of a square matrix, TransformerLens centers the wrong axis: not here.
        lens.enable_compatibility_mode(disable_warnings=True, center_unembed=False, fold_value_biases=not biased)
        torch.testing.assert_close(lens(ids), expected, atol=1e-4, rtol=1e-4)


def test_another_class_is_refused_by_name():
    model = add_kv_shift(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2)))
    with pytest.raises(TypeError, match=f"one of {', '.join(ADAPTERS)}, got a KVShiftGPT2LMHeadModel"):
        bridge(model)
