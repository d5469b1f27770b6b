"""GPT-2's learned positions, options and arguments."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, GPT2Config, GPT2LMHeadModel

from kvshift.models.retrofit import KVShiftGPT2Config, KVShiftGPT2LMHeadModel, add_kv_shift
from kvshift.models.versions import CACHE

from ..llama.checks import logits_of, reference_of
from ..llama.tiny import left_padded, random_tokens
from .tiny import SIZES, shifted_gpt2, tiny_gpt2


def test_left_padding_with_positions():
    model = shifted_gpt2(torch.float64)
    rows = [random_tokens(length, seed=length) for length in (3, 11, 1, 8)]
    ids, mask = left_padded(rows)
    logits = logits_of(model, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    for row, real, got in zip(rows, mask.bool(), logits, strict=True):
        torch.testing.assert_close(got[real], reference_of(model, row), rtol=0, atol=1e-12)


def test_bfloat16_is_near():
    model, ids = shifted_gpt2().to(torch.bfloat16), random_tokens(2, 9)
    torch.testing.assert_close(logits_of(model, ids).float(), logits_of(shifted_gpt2(), ids), rtol=0.1, atol=0.3)


@pytest.mark.parametrize(
    "options",
    [{"reorder_and_upcast_attn": True}, {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}],
    ids=str,
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_its_options(options: dict, attention: str):
    model, ids = tiny_gpt2(attention=attention, **options), random_tokens(2, 7)
    before = model(ids).logits
    assert torch.equal(add_kv_shift(model)(ids).logits, before)


def test_dropout_draws_the_same_numbers():
    model, ids = tiny_gpt2().train(), random_tokens(2, 7)
    torch.manual_seed(3)
    before = model(ids).logits
    add_kv_shift(model)
    assert all(module.training for module in model.modules())
    torch.manual_seed(3)
    assert torch.equal(model(ids).logits, before)


def test_cross_attention_is_named():
    model = GPT2LMHeadModel(GPT2Config(**SIZES, add_cross_attention=True))
    with pytest.raises(ValueError, match=r"add_cross_attention must be False .* crossattention layers"):
        add_kv_shift(model)
    assert type(model) is GPT2LMHeadModel
    with pytest.raises(ValueError, match=r"add_cross_attention must be False"):
        KVShiftGPT2LMHeadModel(KVShiftGPT2Config(**SIZES, add_cross_attention=True))


def test_an_encoder_beside_it():
    model, ids = shifted_gpt2(), random_tokens(1, 5)
    with pytest.raises(ValueError, match="encoder_hidden_states must be None"):
        model(ids, encoder_hidden_states=torch.zeros(1, 5, 36))
    with pytest.raises(ValueError, match=f"{CACHE} is an EncoderDecoderCache"):
        model(ids, **{CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())})
