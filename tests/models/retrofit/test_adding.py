"""`add_kv_shift` in every family: until its coefficients are trained, a model computes the same bits as before."""

import copy
import pickle
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from kvshift import KVShift, ShiftOptions
from kvshift.models.retrofit import add_kv_shift

from ...covering import covering
from ..llama.checks import logits_of
from ..llama.tiny import left_padded, random_tokens, right_padded
from .tiny_families import FAMILIES, SIZES, stock

SHIFTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "queries too, window 4": {"targets": ("q", "k", "v"), "window": 4},
    "clamp": {"constraint": "clamp"},
    "nothing": {"targets": ()},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def options_of(shift: dict[str, Any]) -> ShiftOptions:
    return ShiftOptions(**{"init": "identity", **shift})


def shifts_of(model: torch.nn.Module) -> list[KVShift]:
    return [module for module in model.modules() if isinstance(module, KVShift)]


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
            "use_cache": False,  # with a cache, transformers' own attention sees across documents
        },
    }


@covering(
    family=list(FAMILIES),
    shift=SHIFTS,
    attention=["sdpa", "eager"],
    dtype=[torch.float32, torch.bfloat16],
    given=inputs(),
)
def test_outputs_and_gradients(family: str, shift: dict, attention: str, dtype: torch.dtype, given: dict):
    model = stock(family, dtype, attention)
    real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    labels = given["input_ids"].masked_fill(~(real & real.roll(1, 1)), -100)  # no targets that padding would predict

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
            # backward adds the next token's part, multiplied by 0, in a different order
            torch.testing.assert_close(after[name], before[name], msg=lambda m, n=name: f"{n}: {m}")
        else:
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@every_family
def test_attention_weights_and_pickles(family: str):
    model, ids = stock(family, attention="eager"), random_tokens(2, 7)
    again = pickle.loads(pickle.dumps(add_kv_shift(copy.deepcopy(model))))  # noqa: S301
    before = model(ids, output_attentions=True).attentions
    after = add_kv_shift(model)(ids, output_attentions=True).attentions
    assert [tuple(x.shape) for x in after] == [(2, 4, 7, 7)] * 2
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "GPT-NeoX", "Mistral"])
def test_fields_that_the_model_does_not_read_stay_without_effect(tmp_path, family: str):
    model, ids = stock(family), random_tokens(2, 9)
    model.config.layer_types, model.config.qk_norm = ["full_attention"] * 2, True
    if family != "Mistral":
        model.config.sliding_window = 3
    expected = logits_of(model, ids)
    assert torch.equal(logits_of(add_kv_shift(model), ids), expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path), ids), expected)


@every_family
@pytest.mark.parametrize("headless", [False, True], ids=["", "a decoder without a head"])
def test_the_model_is_changed_where_it_stands(family: str, headless: bool):
    model = stock(family)
    model = model.base_model if headless else model
    kind, config, decoder, parameters = type(model), model.config, model.base_model, dict(model.named_parameters())
    fields = copy.deepcopy(config.to_dict())
    ids, calls = random_tokens(1, 3), []
    before = model(ids)[0]
    attention = next(m for m in reversed(list(model.modules())) if type(m).__name__.endswith("Attention"))
    attention.register_forward_hook(lambda *_: calls.append(1))
    assert add_kv_shift(model) is model
    assert type(model).__name__ == f"KVShift{kind.__name__}"
    assert isinstance(model, kind)
    assert model.base_model is decoder
    assert type(decoder).__name__.startswith("KVShift")
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert {name.rpartition(".shift.")[2] for name in after.keys() - parameters.keys()} == {"alpha", "beta"}
    heads = 4 if family in ("GPT-2", "GPT-NeoX") else 2
    assert {tuple(x.shape) for name, x in after.items() if ".shift." in name} == {(heads, 2)}
    assert torch.equal(model(ids)[0], before)
    assert calls == [1]
    assert len(model(ids, output_hidden_states=True).hidden_states) == 3
    # The original configuration, which other models may use, is unchanged.
    assert model.config is not config
    assert type(config) is kind.config_class
    assert config.to_dict() == fields
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))


@covering(family=list(FAMILIES), shift=SHIFTS)
def test_the_options_reach_layers_and_configuration(family: str, shift: dict):
    model = add_kv_shift(stock(family), options_of(shift))
    assert len(shifts_of(model)) == SIZES["num_hidden_layers"]
    expected = {"targets": ("k", "v"), "window": 2, "constraint": "free", "init": "identity", **shift}
    for layer in shifts_of(model):
        assert layer.options == ShiftOptions(**expected)
        assert {parameter.shape[1] for parameter in layer.parameters()} <= {expected["window"]}
    assert {name: getattr(model.config, f"shift_{name}") for name in expected} == {
        **expected,
        "targets": list(expected["targets"]),
    }


@every_family
def test_uniform_starts_as_in_the_paper_added_and_from_scratch(family: str):
    torch.manual_seed(5)
    added = add_kv_shift(stock(family), ShiftOptions(init="uniform"))
    for model in (added, AutoModelForCausalLM.from_config(added.config)):
        assert len(shifts_of(model)) == 2
        for shift in shifts_of(model):
            for coefficients in (shift.alpha, shift.beta):
                torch.testing.assert_close(coefficients.sum(1), torch.ones(len(coefficients)))
                assert ((coefficients > 0) & (coefficients < 1)).all()


@every_family
def test_a_model_from_scratch_draws_the_weights_of_its_family_first(family: str):
    """Therefore models with and without shift start from the same bits."""
    config = stock(family).config
    with_shift = add_kv_shift(stock(family), ShiftOptions(init="uniform")).config
    torch.manual_seed(5)
    vanilla = AutoModelForCausalLM.from_config(config).state_dict()
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(with_shift)
    if family != "Llama":  # Llama builds its layers with their coefficients
        for name, tensor in vanilla.items():
            assert torch.equal(model.state_dict()[name], tensor), name
    first, second = shifts_of(model)
    assert not torch.equal(first.alpha, second.alpha)


def test_an_adapter_does_not_name_a_model_without_shift(tmp_path):
    """PEFT would load that one, and compute without the shift."""
    stock("Qwen3").save_pretrained(tmp_path / "stock")
    model = add_kv_shift(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"))
    assert model.name_or_path == str(tmp_path / "stock")  # where lm-eval looks for the tokenizer
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    assert not LoraConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path
    with pytest.raises((OSError, ValueError, TypeError)):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_coefficients_beside_adapters_are_frozen_as_they_would_not_be_saved():
    adapted = get_peft_model(stock("Qwen3"), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model = add_kv_shift(adapted.get_base_model())
    trained = {name.split(".")[-3] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"lora_A", "lora_B"}


def test_a_model_whose_projections_hold_buffers_only():
    """As those of quantized models do."""
    model, ids = stock("Llama"), random_tokens(1, 5)
    expected = logits_of(model, ids)
    for module in list(model.modules()):
        if isinstance(module, torch.nn.Linear):
            module.register_buffer("weight", module._parameters.pop("weight").detach())
    assert torch.equal(logits_of(add_kv_shift(model), ids), expected)


@pytest.mark.parametrize("family", ["Llama", "GPT-NeoX"])
def test_a_model_spread_over_devices(family: str):
    """Accelerate's hooks, as a device_map leaves them, would keep calling the forward of the old class."""
    model = stock(family)
    kind = type(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"a hook in place of .*add the shift before the model is spread"):
        add_kv_shift(model)
    assert type(model) is kind
    assert not shifts_of(model)
