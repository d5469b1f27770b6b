"""GPT-2's learned positions, options and arguments."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from kvshift.models.retrofit import add_kv_shift
from kvshift.models.versions import CACHE

from ..llama.checks import logits_of
from ..llama.tiny import random_tokens
from .tiny_families import shifted_gpt2, stock


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
    model, ids = stock("GPT-2", attention=attention, **options), random_tokens(2, 7)
    before = model(ids).logits
    assert torch.equal(add_kv_shift(model)(ids).logits, before)


def test_dropout_draws_the_same_numbers():
    model, ids = stock("GPT-2").train(), random_tokens(2, 7)
    torch.manual_seed(3)
    before = model(ids).logits
    add_kv_shift(model)
    assert all(module.training for module in model.modules())
    torch.manual_seed(3)
    assert torch.equal(model(ids).logits, before)


def test_an_encoder_beside_it():
    model, ids = shifted_gpt2(), random_tokens(1, 5)
    with pytest.raises(ValueError, match="encoder_hidden_states must be None"):
        model(ids, encoder_hidden_states=torch.zeros(1, 5, 48))
    with pytest.raises(ValueError, match=f"{CACHE} is an EncoderDecoderCache"):
        model(ids, **{CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())})
