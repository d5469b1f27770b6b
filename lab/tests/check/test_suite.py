"""The verdicts of `check_model` on sound models, and its other promises."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CTRLConfig,
    CTRLLMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)

from kvshift.models.retrofit import add_kv_shift
from kvshift_lab.check import PROPERTIES, check_model
from tests.models.llama.tiny import tiny_model
from tests.models.registry import MODELS
from tests.models.retrofit.tiny_families import FAMILIES, shifted, shifted_gpt2, stock

OURS: dict[str, Callable[[], PreTrainedModel]] = {
    **MODELS,
    "Llama, queries too, window 3, QK norm": partial(
        tiny_model, shift_targets=("q", "k", "v"), shift_window=3, qk_norm=True
    ),
    "Llama, gate": partial(tiny_model, shift_constraint="gate"),
    "Llama, eager": partial(tiny_model, attention="eager"),
    "Llama, float64": partial(tiny_model, dtype=torch.float64),
    "GPT-2, keys alone": partial(shifted_gpt2, targets=("k",), window=3),
    **{family: partial(shifted, family, torch.float32) for family in FAMILIES if family not in ("GPT-2", "Llama")},
}
FAST = ("Llama", "Llama, queries too, window 3, QK norm", "GPT-2", "Baichuan-M1")
NEEDS_POSITIONS = {"left padding: mask alone": "not supported"}  # it has learned positions


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in OURS])
def test_our_models_are_right(name):
    report = check_model(OURS[name](), length=16)
    assert [verdict.property for verdict in report.verdicts] == list(PROPERTIES)
    others = {verdict.property: verdict.verdict for verdict in report.verdicts if verdict.verdict != "right"}
    assert others == (NEEDS_POSITIONS if "GPT-2" in name else {})
    for verdict in report.verdicts:
        if verdict.verdict == "right" and verdict.tolerance:
            assert verdict.error < verdict.tolerance / 4  # far below the tolerance
    assert report.tolerance < report.spread / 1000


def tiny_ctrl() -> CTRLLMHeadModel:
    """Return a CTRL, which scales its embeddings in place, whether it looks them up or receives them."""
    torch.manual_seed(0)
    return CTRLLMHeadModel(CTRLConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, dff=48, n_positions=128)).eval()


def tiny_xlnet(attention: str) -> XLNetLMHeadModel:
    """Return an XLNet: positions come before sequences, and max_position_embeddings is -1, which means no limit."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
    return XLNetLMHeadModel(XLNetConfig(attn_type=attention, **sizes)).eval()


def test_ctrl_is_right_but_for_documents_beside_a_mask_or_a_cache():
    """These are wrong in all models of transformers."""
    report = check_model(tiny_ctrl(), length=12)
    wrong = {verdict.property for verdict in report.wrong}
    assert report.of("causality").verdict == "right"
    assert wrong == {
        "documents: position_ids, mask",
        "documents: position_ids, cache",
        "documents: several rows, cache",
        "documents: padding",
        "documents: padding, cache",
        "documents: chunked prefill",
    }


def test_a_later_token_that_ctrl_sees_is_found():
    """The gradients are those of the logits even though the model scales its embeddings in place."""
    model = tiny_ctrl()
    model.transformer.layernorm.register_forward_hook(lambda norm, given, x: x + x.flip(1))
    verdict = check_model(model, length=12, properties=["causality"]).of("causality")
    assert verdict.verdict == "wrong"
    assert (verdict.first["case"], verdict.first["position"]) == ("position 0", 1)


@pytest.mark.parametrize(("attention", "causality"), [("uni", "right"), ("bi", "wrong")])
def test_xlnet_has_no_longest_sequence(attention, causality):
    report = check_model(tiny_xlnet(attention), length=40, properties=["causality", "batch", "inputs_embeds"])
    assert [verdict.verdict for verdict in report.verdicts] == [causality, "right", "right"]


def test_documents_of_a_model_without_position_ids_are_not_supported():
    report = check_model(tiny_xlnet("uni"), length=12, properties=[name for name in PROPERTIES if "documents" in name])
    assert {verdict.verdict for verdict in report.verdicts if "padding" not in verdict.property} == {"not supported"}


def test_drafts_were_rejected():
    report = check_model(tiny_model(), length=16, properties=["generate: assisted", "generate: prompt lookup"])
    for verdict in report.verdicts:
        assert int(verdict.detail.removesuffix(" draft tokens rejected")) > 3


def test_half_precision_is_checked_in_float32():
    model = tiny_model(torch.bfloat16)
    report = check_model(model, properties=["batch"])
    assert report.dtype == "float32"
    assert report.notes == ["checked in float32; the model is in bfloat16"]
    assert model.dtype == torch.bfloat16
    assert check_model(model, properties=["batch"], dtype=torch.bfloat16).dtype == "bfloat16"


def test_the_model_is_left_as_it_was():
    model = tiny_model().train()
    model.model.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generation, config, attributes = model.generation_config, copy.deepcopy(vars(model.config)), set(vars(model))
    torch.manual_seed(5)
    random = torch.get_rng_state()
    check_model(model, length=12)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert model.generation_config is generation
    assert vars(model.config) == config
    assert set(vars(model)) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


def test_a_peft_model_is_checked_with_its_adapters():
    import peft

    model = tiny_model()
    whole = check_model(model, length=12, properties=["cache: every split"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False))
    report = check_model(adapted, length=12, properties=["cache: every split", "generate: assisted"])
    assert [verdict.verdict for verdict in report.verdicts] == ["right", "right"]
    assert report.spread != whole.spread


def test_the_report_is_json():
    report = check_model(tiny_model(), length=12, properties=["causality", "batch"])
    values = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert [verdict["property"] for verdict in values["verdicts"]] == ["causality", "batch"]
    assert set(values["versions"]) == {"kvshift", "python", "torch", "transformers"}


def test_a_window_that_is_not_reached_is_noted():
    report = check_model(tiny_model(sliding_window=40), properties=["batch"])
    assert report.notes == ["sliding_window=40 is not reached by sequences of 24 tokens"]


def test_a_shift_that_gives_earlier_tokens_no_weight_is_noted():
    """What it would carry across a boundary is multiplied by 0."""
    import peft

    (said,) = check_model(add_kv_shift(stock("Qwen3")), properties=["batch"]).notes
    assert re.fullmatch(r"the shift of \d layers gives earlier tokens no weight yet: its faults cannot be seen", said)
    assert not check_model(tiny_model(), properties=["batch"]).notes
    adapted = peft.get_peft_model(
        add_kv_shift(stock("Qwen3")), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["shift"])
    )
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.uniform_(parameter)
    assert not check_model(adapted, properties=["batch"]).notes
    assert not check_model(tiny_model(shift_targets=[]), properties=["batch"]).notes


def test_special_tokens_are_not_drawn():
    from kvshift_lab.check.subject import Subject

    subject = Subject(tiny_model(), 12, leave_out=[2, 7])
    drawn = subject.tokens(50, 50)
    assert set(drawn.flatten().tolist()) == set(range(61)) - {2, 7}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 11}, "length must be 12 or more, got 11"),
        ({"length": 57}, "length must be at most 56 for a model with max_position_embeddings=128, got 57"),
        ({"properties": ["batch", "speed"]}, "properties must be one or more of .*, got \\['batch', 'speed'\\]"),
        ({"properties": []}, "properties must be one or more of"),
    ],
    ids=["short", "long", "unknown", "none"],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        check_model(tiny_model(), **options)


def test_what_is_no_causal_language_model_is_refused():
    sizes = {"vocab_size": 61, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    t5 = T5Config(vocab_size=61, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    for model in (nn.Linear(3, 3), BertModel(BertConfig(**sizes))):
        with pytest.raises(TypeError, match=f"causal language model of transformers.*got {type(model).__name__}"):
            check_model(model)
    with pytest.raises(TypeError, match="without an encoder, got T5ForConditionalGeneration"):
        check_model(T5ForConditionalGeneration(t5))


def test_logits_that_are_not_finite_are_refused():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="finite logits that differ, got a spread of nan"):
        check_model(model)
