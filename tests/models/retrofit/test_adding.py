"""Before its coefficients are trained, the model computes what it did before, bit for bit."""

import copy
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from kvshift import KVShift, ShiftOptions
from kvshift.models.retrofit import KVShiftGPT2LMHeadModel, KVShiftGPT2Model, add_kv_shift

from ...covering import covering
from ..llama.tiny import left_padded, random_tokens, right_padded
from .tiny import SIZES, tiny_gpt2

SHIFTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "queries too, window 4": {"targets": ("q", "k", "v"), "window": 4},
    "clamp": {"constraint": "clamp"},
    "nothing": {"targets": ()},
}
every_shift = pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS.keys())


def options_of(shift: dict[str, Any]) -> ShiftOptions:
    return ShiftOptions(**{"init": "identity", **shift})


def inputs() -> dict[str, dict[str, Any]]:
    rows = [random_tokens(length, seed=length) for length in (4, 11, 1)]
    left, left_mask = left_padded(rows)
    right, right_mask = right_padded(rows)
    return {
        "whole rows": {"input_ids": random_tokens(3, 11)},
        "padded left": {
            "input_ids": left,
            "attention_mask": left_mask,
            "position_ids": (left_mask.cumsum(1) - 1).clamp(min=0),
        },
        "padded right": {"input_ids": right, "attention_mask": right_mask},
        "documents": {
            "input_ids": random_tokens(1, 7),
            "position_ids": torch.tensor([[0, 1, 0, 0, 1, 2, 3]]),
            "use_cache": False,  # beside a cache transformers' own attention sees across documents
        },
    }


@covering(shift=SHIFTS, attention=["sdpa", "eager"], dtype=[torch.float32, torch.bfloat16], given=inputs())
def test_outputs_and_gradients(shift: dict, attention: str, dtype: torch.dtype, given: dict):
    model = tiny_gpt2(dtype, attention=attention)
    real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    labels = given["input_ids"].masked_fill(~(real & real.roll(1, 1)), -100)  # nor what padding is to predict

    def outputs() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        result = model(**given, labels=labels, output_hidden_states=True)
        result.loss.backward()
        found = {"logits": result.logits[real], "loss": result.loss}
        found |= {f"hidden {i}": hidden[real] for i, hidden in enumerate(result.hidden_states)}
        found |= {name: p.grad for name, p in model.named_parameters() if ".shift." not in name}
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    before = outputs()
    assert len(before) == 2 + 3 + len(list(model.parameters()))
    add_kv_shift(model, options_of(shift))
    after = outputs()
    assert after.keys() == before.keys()
    for name in before:
        if name.endswith(("weight", "bias")):
            # backward adds the part of the next token, 0 times, in another order
            torch.testing.assert_close(after[name], before[name], msg=lambda m, n=name: f"{n}: {m}")
        else:
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@every_shift
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
def test_generation(shift: dict, cache: dict):
    model = tiny_gpt2()
    ids, mask = left_padded([random_tokens(4), random_tokens(9)])
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "output_scores": True, **cache}
    before = model.generate(ids, return_dict_in_generate=True, **options)
    after = add_kv_shift(model, options_of(shift)).generate(ids, return_dict_in_generate=True, **options)
    torch.testing.assert_close(after.sequences, before.sequences, rtol=0, atol=0)
    for new, old in zip(after.scores, before.scores, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)


def test_attention_weights_are_captured():
    model, ids = tiny_gpt2(attention="eager"), random_tokens(2, 7)
    before = model(ids, output_attentions=True).attentions
    after = add_kv_shift(model)(ids, output_attentions=True).attentions
    assert len(after) == 2
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))


def test_the_model_is_changed_where_it_stands():
    model = tiny_gpt2()
    config, decoder, parameters = model.config, model.transformer, dict(model.named_parameters())
    fields = copy.deepcopy(config.to_dict())
    calls = []
    model.transformer.h[1].attn.register_forward_hook(lambda *_: calls.append(1))
    assert add_kv_shift(model) is model
    assert type(model) is KVShiftGPT2LMHeadModel
    assert type(model.transformer) is KVShiftGPT2Model
    assert isinstance(model, GPT2LMHeadModel)
    assert model.transformer is decoder
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    added = set(dict(model.named_parameters())) - set(parameters)
    assert added == {f"transformer.h.{i}.attn.shift.{name}" for i in range(2) for name in ("alpha", "beta")}
    model(random_tokens(1, 3))
    assert calls == [1]
    # the configuration may belong to other models: it stays
    assert model.config is not config
    assert type(config) is GPT2Config
    assert config.to_dict() == fields
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))


def test_a_decoder_without_a_head():
    model, ids = tiny_gpt2().transformer, random_tokens(2, 7)
    before = model(ids).last_hidden_state
    assert type(add_kv_shift(model)) is KVShiftGPT2Model
    assert torch.equal(model(ids).last_hidden_state, before)
    assert len(model(ids, output_hidden_states=True).hidden_states) == 3


@every_shift
def test_the_options_reach_layers_and_configuration(shift: dict):
    model = add_kv_shift(tiny_gpt2(), options_of(shift))
    layers = [module for module in model.modules() if isinstance(module, KVShift)]
    assert len(layers) == SIZES["n_layer"]
    expected = {"targets": ("k", "v"), "window": 2, "constraint": "free", "init": "identity", **shift}
    for layer in layers:
        assert layer.options == ShiftOptions(**expected)
        for parameter in layer.parameters():
            assert parameter.shape == (SIZES["n_head"], expected["window"])
    assert {name: getattr(model.config, f"shift_{name}") for name in expected} == {
        **expected,
        "targets": list(expected["targets"]),
    }


def test_uniform_starts_as_in_the_paper():
    torch.manual_seed(5)
    model = add_kv_shift(tiny_gpt2(), ShiftOptions(init="uniform"))
    for block in model.transformer.h:
        for coefficients in (block.attn.shift.alpha, block.attn.shift.beta):
            torch.testing.assert_close(coefficients.sum(1), torch.ones(3))
            assert ((coefficients > 0) & (coefficients < 1)).all()


def test_a_model_from_scratch_draws_gpt2s_weights_first():
    """So twins with shift and without start from the same bits."""
    torch.manual_seed(5)
    vanilla = GPT2Model(GPT2Config(**SIZES)).state_dict()
    torch.manual_seed(5)
    model = KVShiftGPT2Model(KVShiftGPT2Model.config_class(**SIZES))
    for name, tensor in vanilla.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert not torch.equal(model.h[0].attn.shift.alpha, model.h[1].attn.shift.alpha)
