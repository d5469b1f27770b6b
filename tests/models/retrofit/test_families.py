"""Every family: shift and gradients compared with the truth, classification, fields, and families that are refused."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from kvshift import KVShift
from kvshift.models.retrofit import add_kv_shift

from ...covering import covering
from ..llama.checks import logits_of
from ..llama.tiny import PAD, left_padded, random_tokens
from .tiny_families import FAMILIES, shifted, stock, truth_of

every_family = pytest.mark.parametrize("family", FAMILIES)
ATOL = 3e-5  # rotary tables and norms are float32 even in a float64 model; logits are of size 3 to 17


@covering(
    family=list(FAMILIES),
    attention=["eager", "sdpa"],
    shift=[{}, {"targets": ("q", "k", "v"), "window": 3}, {"targets": ("v",)}],
)
def test_a_shift_against_projections_with_loops(family: str, attention: str, shift: dict):
    model, ids = shifted(family, attention=attention, shift=shift), random_tokens(2, 13)
    logits = logits_of(model, ids)
    torch.testing.assert_close(logits, logits_of(truth_of(model), ids), rtol=0, atol=ATOL)
    unshifted = logits_of(stock(family, torch.float64), ids)
    assert (logits - unshifted)[:, 1:].abs().amax((0, 2)).min() > 0.1  # otherwise the tests of this file could not fail


@every_family
def test_classification(family: str):
    model = shifted(family, classifies=True, pad_token_id=PAD)
    sequences = [random_tokens(4), random_tokens(11)]
    ids, mask = left_padded(sequences)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    truth = truth_of(model)
    alone = torch.cat([logits_of(truth, sequence.unsqueeze(0)) for sequence in sequences])
    torch.testing.assert_close(together, alone, rtol=0, atol=ATOL)


@every_family
@pytest.mark.parametrize("attention_bias", [False, True])
def test_the_fields_of_a_family_say_what_its_attention_has(family: str, attention_bias: bool):
    """Only some families use `attention_bias`."""
    model = shifted(family, attention_bias=attention_bias)
    fields = type(model).family
    for module in model.modules():
        if isinstance(module, fields.attention[1]):
            names = {name for name, _ in module.named_parameters()}
            biases = {name.partition(".")[0] for name in names if name.endswith(".bias")}
            outputs = biases & {"o_proj", "c_proj", "dense"}
            assert bool(outputs) == (attention_bias if fields.output_bias is None else fields.output_bias)
            assert bool(biases - outputs) == (attention_bias if fields.bias is None else fields.bias)
            assert ("q_norm.weight" in names) == fields.qk_norm == getattr(module, "qk_norm", False)


def gradients_of(model: PreTrainedModel, of: PreTrainedModel, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of the parameters of `of`, which `model` uses."""
    for parameter in (*model.parameters(), *of.parameters()):
        parameter.grad = None
    model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in of.named_parameters() if parameter.grad is not None}


@every_family
def test_gradients_of_the_coefficients(family: str):
    """The loops of the truth read the same coefficients."""
    model, ids = shifted(family), random_tokens(2, 9)
    got, expected = gradients_of(model, model, input_ids=ids), gradients_of(truth_of(model), model, input_ids=ids)
    assert len(expected) == 4
    assert all(".shift." in name for name in expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


# Models similar to those of the list, for which the same code would compute something else or fail.
OTHERS = {
    "gemma2": {},
    "olmo2": {},
    "smollm3": {},
    "ministral3": {},
    "gpt_oss": {"num_local_experts": 2},
    "deepseek_v3": {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
    "granite": {},
    "starcoder2": {},
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_every_other_family_is_refused_by_name(model_type: str):
    sizes = {"hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": None, "vocab_size": 61}
    config = AutoConfig.for_model(model_type, **sizes, **OTHERS[model_type])
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    kind = type(model)
    with pytest.raises(ValueError, match=rf"{kind.__name__} \(model_type '{model_type}'\).*CONTRIBUTING.md"):
        add_kv_shift(model)
    assert type(model) is kind
    assert not any(isinstance(module, KVShift) for module in model.modules())
