"""Models that cannot get a shift are refused with the reason, and left unchanged."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, GPT2Config, GPT2DoubleHeadsModel, GPT2LMHeadModel
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Model

from kvshift.models.retrofit import KVShiftGPT2Config, KVShiftGPT2LMHeadModel, add_kv_shift

from ..llama.tiny import tiny_model
from .tiny_families import shifted_gpt2, stock, tiny_config


class MyGPT2(GPT2LMHeadModel):
    """A subclass may compute something else."""


class MyAttention(Qwen3Attention):
    """So may one of a part."""


class MyDecoder(Qwen3Model):
    """And that of a decoder gives the shift neither documents nor padding."""


def with_class(part, kind):
    """Return a Qwen3 in which the class of a part is another."""
    model = stock("Qwen3")
    model.get_submodule(part).__class__ = kind
    return model


def changed(family, **fields):
    return AutoModelForCausalLM.from_config(tiny_config(family, **fields))


BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 61}
HALVES = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
REFUSED = {
    "already has a KV shift: KVShiftGPT2LMHeadModel": lambda: add_kv_shift(stock("GPT-2")),
    "already has a KV shift: KVShiftLlamaForCausalLM": tiny_model,
    "already has a KV shift: .*, which shifts nothing: load it with other": lambda: shifted_gpt2(targets=()),
    r"BertModel \(model_type 'bert'\), .* supported: GPT2Model, GPT2LMHead": lambda: BertModel(BertConfig(**BERT)),
    r"GPT2DoubleHeadsModel \(model_type 'gpt2'\)": lambda: GPT2DoubleHeadsModel(tiny_config("GPT-2")),
    r"Linear \(model_type 'none'\)": lambda: torch.nn.Linear(2, 3),
    "is a MyGPT2": lambda: MyGPT2(tiny_config("GPT-2")),
    r"has a \S+MyAttention as model.layers.1.self_attn": lambda: with_class("model.layers.1.self_attn", MyAttention),
    r"has a \S+MyDecoder as model,": lambda: with_class("model", MyDecoder),
    "use_bidirectional_attention must be False": lambda: changed("Gemma 3", use_bidirectional_attention=True),
    "rope_parameters must rotate whole heads": lambda: changed("Llama", rope_parameters=HALVES),
    "add_cross_attention must be False .* crossattention layers": lambda: changed("GPT-2", add_cross_attention=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_model_that_cannot_get_a_shift(message):
    model = REFUSED[message]()
    kind, names = type(model), set(model.state_dict())
    with pytest.raises(ValueError, match=message):
        add_kv_shift(model)
    assert type(model) is kind
    assert set(model.state_dict()) == names


def test_subclasses_of_ours_and_models_without_layers_are_built():
    """As code of the hub that `kvshift export --remote-code` writes does."""
    decoder = add_kv_shift(stock("Qwen3").model)
    made = type("Exported", (type(decoder),), {})(decoder.config)
    assert made.layers[0].self_attn.shift.targets == ("k", "v")
    add_kv_shift(stock("Qwen3", num_hidden_layers=0))


def test_a_layer_that_was_patched_before_the_model_is_built(monkeypatch):
    """The weights would be loaded into a model without shift."""
    config = add_kv_shift(stock("Qwen3")).config
    monkeypatch.setattr(modeling_qwen3, "Qwen3Attention", MyAttention)
    with pytest.raises(ValueError, match=r"has a \S+MyAttention as model.layers.0.self_attn"):
        AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(modeling_qwen3, "Qwen3Attention", lambda **_: torch.nn.Identity())
    with pytest.raises(ValueError, match=r"has no transformers\.models\.qwen3\.modeling_qwen3\.Qwen3Attention"):
        AutoModelForCausalLM.from_config(config)


def test_what_is_of_another_type():
    model = stock("GPT-2")
    with pytest.raises(TypeError, match="model must be a model of transformers, got NoneType"):
        add_kv_shift(None)
    with pytest.raises(TypeError, match="options must be ShiftOptions, got tuple"):
        add_kv_shift(model, ("k", "v"))
    assert type(model) is GPT2LMHeadModel
    with pytest.raises(TypeError, match="config must be a KVShiftGPT2Config, which says what to shift, got GPT2Config"):
        KVShiftGPT2LMHeadModel(GPT2Config())
    with pytest.raises(ValueError, match="add_cross_attention must be False"):
        KVShiftGPT2LMHeadModel(KVShiftGPT2Config(add_cross_attention=True))
