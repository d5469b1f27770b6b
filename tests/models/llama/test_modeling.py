"""Logits equal the reference in every variant, and transformers' own Llama if nothing is shifted."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift.models.versions import CACHE

from .checks import ATOL, check_forward, logits_of, reference_of
from .tiny import PAD, SIZES, left_padded, random_tokens, randomize, right_padded, tiny_model

VARIANTS = {
    "k and v": {},
    "k": {"shift_targets": ["k"]},
    "v": {"shift_targets": ["v"]},
    "q": {"shift_targets": ["q"]},
    "q and v": {"shift_targets": ("v", "q")},
    "q, k and v": {"shift_targets": ["q", "k", "v"]},
    "none": {"shift_targets": []},
    "window 3": {"shift_window": 3},
    "window 4, q, k and v": {"shift_window": 4, "shift_targets": ["q", "k", "v"]},
    "gate": {"shift_constraint": "gate"},
    "clamp": {"shift_constraint": "clamp", "shift_window": 3},
    "qk_norm": {"qk_norm": True},
    "qk_norm after a shifted q": {"qk_norm": True, "shift_targets": ["q", "k", "v"]},
    "sliding window": {"sliding_window": 5},
    "sliding window, qk_norm, window 3": {"sliding_window": 5, "qk_norm": True, "shift_window": 3},
    "sliding window without shift": {"sliding_window": 5, "shift_targets": []},
    "no biases": {"attention_bias": False},
    "tied embeddings": {"tie_word_embeddings": True},
    "RoPE base": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "MHA": {"num_key_value_heads": 6},
    "MQA": {"num_key_value_heads": 1},
    "padding token in the vocabulary": {"pad_token_id": 0},
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_variant_equals_the_reference(options: dict, attention: str):
    check_forward(tiny_model(attention=attention, **options))


def test_a_sliding_window_counts_tokens_and_not_the_padding_between_them():
    """A sequence continued after right padding sees as many tokens as without padding; in Mistral it sees fewer."""
    ours = tiny_model(sliding_window=5, shift_targets=[], attention_bias=False)
    mistral = MistralForCausalLM(MistralConfig(**{**SIZES, "sliding_window": 5})).eval()
    mistral.load_state_dict(ours.state_dict())
    rows = [random_tokens(length, seed=length) for length in (3, 9)]
    ids, mask = right_padded(rows)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    caches = [DynamicCache(config=model.config) for model in (ours, mistral)]
    token, lengths = random_tokens(2, 1, seed=9), mask.sum(1, keepdim=True)
    behind = {"attention_mask": torch.cat([mask, torch.ones_like(token)], dim=1), "position_ids": lengths}
    got = []
    for model, cache in zip((ours, mistral), caches, strict=True):
        logits_of(model, ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
        got.append(logits_of(model, token, **{CACHE: cache}, **behind)[:, -1])
    expected = [reference_of(ours, torch.cat([row, new]))[-1] for row, new in zip(rows, token, strict=True)]
    torch.testing.assert_close(got[0], torch.stack(expected), rtol=0, atol=ATOL)
    torch.testing.assert_close(got[1][1], expected[1], rtol=0, atol=ATOL)
    assert (got[1][0] - expected[0]).abs().max() > 0.1


def test_exactly_one_of_ids_and_embeddings_is_needed():
    for inputs in ({}, {"input_ids": random_tokens(2, 7), "inputs_embeds": torch.zeros(2, 7, 42)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            tiny_model()(**inputs)


def test_a_mask_of_ones_changes_no_bit():
    model, ids = tiny_model(attention="sdpa"), random_tokens(2, 7)
    for mask in (torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool)):
        torch.testing.assert_close(logits_of(model, ids, attention_mask=mask), logits_of(model, ids), rtol=0, atol=0)


# Both warnings concern how transformers uses torch.
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_flex_attention_equals_the_reference():
    """Flex attention is compiled, so a single model covers all that its masks can contain: a window and padding."""
    model = tiny_model(attention="flex_attention", head_dim=16, sliding_window=5, qk_norm=True)
    rows = [random_tokens(length, seed=length) for length in (9, 4)]
    ids, mask = left_padded(rows)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    for row, real, got in zip(rows, mask.bool(), logits, strict=True):
        torch.testing.assert_close(got[real], reference_of(model, row), rtol=0, atol=ATOL)


def llama_pair(**options) -> tuple[LlamaForCausalLM, KVShiftLlamaForCausalLM]:
    """Return transformers' Llama, and ours without targets, with the same weights."""
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **options}), attn_implementation="sdpa").eval()
    randomize(llama)
    ours = tiny_model(attention="sdpa", shift_targets=[], **options)
    ours.load_state_dict(llama.state_dict())
    return llama, ours


@pytest.mark.parametrize("options", [{}, {"attention_bias": False, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_without_targets_it_is_llama_bit_for_bit(options: dict):
    llama, ours = llama_pair(**options)
    ids, mask = left_padded([random_tokens(11), random_tokens(5)])
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids, "labels": ids}):
        expected, got = llama(**inputs), ours(**inputs)
        torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=0)
        if "labels" in inputs:
            torch.testing.assert_close(got.loss, expected.loss, rtol=0, atol=0)
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    torch.testing.assert_close(ours.generate(ids, **options), llama.generate(ids, **options), rtol=0, atol=0)


@pytest.mark.parametrize("targets", [["k", "v"], ["q", "k", "v"]])
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_checkpoint_loads_with_its_function_unchanged(tmp_path, targets: list[str], tied: bool):
    llama, _ = llama_pair(tie_word_embeddings=tied)
    llama.save_pretrained(tmp_path)
    config = KVShiftLlamaConfig(
        **{**SIZES, "tie_word_embeddings": tied}, shift_targets=targets, shift_window=3, shift_init="identity"
    )
    ours, loading = KVShiftLlamaForCausalLM.from_pretrained(
        tmp_path, config=config, attn_implementation="sdpa", output_loading_info=True
    )
    names = {"q": "gamma", "k": "alpha", "v": "beta"}
    assert set(loading["missing_keys"]) == {
        f"model.layers.{i}.self_attn.shift.{names[target]}" for i in range(2) for target in targets
    }
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    ids, mask = left_padded([random_tokens(11), random_tokens(5)])
    for inputs in ({}, {"attention_mask": mask}):
        torch.testing.assert_close(logits_of(ours, ids, **inputs), logits_of(llama, ids, **inputs), rtol=0, atol=0)


def test_hidden_states_and_attention_weights_can_be_recorded():
    model, ids = tiny_model(attention="eager"), random_tokens(2, 7)
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True, output_attentions=True)
    assert [tuple(states.shape) for states in outputs.hidden_states] == [(2, 7, 42)] * 3
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(2, 6, 7, 7)] * 2
    torch.testing.assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits, rtol=0, atol=0)


def test_the_callers_tensors_are_not_edited():
    model = tiny_model()
    ids, mask = left_padded([random_tokens(7), random_tokens(3)])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    before = {name: tensor.clone() for name, tensor in given.items()}
    with torch.no_grad():
        model(**given)
    for name, tensor in given.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_layers_are_built_once(monkeypatch):
    """Llama's own layers are not built first and then discarded: at 19 billion parameters that would not fit."""
    built = []
    original = torch.nn.Linear.__init__
    monkeypatch.setattr(
        torch.nn.Linear, "__init__", lambda self, *a, **k: (built.append(1), original(self, *a, **k))[1]
    )
    model = tiny_model()
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    replaced = 4 * model.config.num_hidden_layers  # the projections, one layer at a time
    assert len(built) <= linears + replaced
