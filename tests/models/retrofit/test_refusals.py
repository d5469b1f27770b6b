"""Models that cannot get a shift are refused with the reason, and left unchanged."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2LMHeadModel,
)

from kvshift.models.retrofit import KVShiftGPT2LMHeadModel, add_kv_shift

from ..llama.tiny import tiny_model
from .tiny_families import shifted_gpt2, stock, tiny_config


def test_a_model_that_has_a_shift():
    with pytest.raises(ValueError, match="model already has a KV shift: KVShiftGPT2LMHeadModel"):
        add_kv_shift(add_kv_shift(stock("GPT-2")))
    with pytest.raises(ValueError, match="model already has a KV shift: KVShiftLlamaForCausalLM"):
        add_kv_shift(tiny_model())
    with pytest.raises(ValueError, match="model already has a KV shift"):
        add_kv_shift(shifted_gpt2(targets=()))


def test_an_unknown_model_is_named_beside_the_known_ones():
    bert = BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=61)
    )
    with pytest.raises(ValueError, match=r"BertModel \(model_type 'bert'\), .* supported: GPT2Model, GPT2LMHeadModel"):
        add_kv_shift(bert)
    with pytest.raises(ValueError, match=r"model is a GPT2DoubleHeadsModel \(model_type 'gpt2'\)"):
        add_kv_shift(GPT2DoubleHeadsModel(tiny_config("GPT-2")))
    with pytest.raises(ValueError, match=r"model is a Linear \(model_type 'none'\)"):
        add_kv_shift(torch.nn.Linear(2, 3))


def test_what_is_no_model():
    with pytest.raises(TypeError, match="model must be a model of transformers, got NoneType"):
        add_kv_shift(None)
    with pytest.raises(TypeError, match="config must be a KVShiftGPT2Config, which says what to shift, got GPT2Config"):
        KVShiftGPT2LMHeadModel(GPT2Config())


def test_a_subclass_may_compute_something_else():
    class MyGPT2(GPT2LMHeadModel):
        pass

    with pytest.raises(ValueError, match="model is a MyGPT2"):
        add_kv_shift(MyGPT2(tiny_config("GPT-2")))


def test_options():
    model = stock("GPT-2")
    with pytest.raises(TypeError, match="options must be ShiftOptions, got tuple"):
        add_kv_shift(model, ("k", "v"))
    assert type(model) is GPT2LMHeadModel
    assert set(model.state_dict()) == set(stock("GPT-2").state_dict())
