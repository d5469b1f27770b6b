"""Every model with KV shift, however it is called, gives the results of the reference for each sequence alone.

Arcee is an example of how a few lines add another rotary family.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import ArceeConfig, ArceeForCausalLM, PreTrainedModel
from transformers.models.arcee import modeling_arcee

from kvshift import ShiftOptions
from kvshift.models.retrofit import adding
from kvshift.models.retrofit.family import rotary_family

from .llama import checks
from .llama.tiny import PAD, random_tokens, randomize, tiny_model
from .registry import MODELS
from .retrofit.tiny_families import SIZES, shifted_gpt2

STATIC, UNCACHED = {"cache_implementation": "static"}, {"use_cache": False}
CHECKS: dict[str, Callable[[PreTrainedModel], None]] = {
    "forward": checks.check_forward,
    "greedy": checks.check_decoding,
    "greedy, static": partial(checks.check_decoding, **STATIC),
    "greedy, uncached": partial(checks.check_decoding, **UNCACHED),
    "left padding": checks.check_left_padding,
    "left padding, static": partial(checks.check_left_padding, **STATIC),
    "left padding, uncached": partial(checks.check_left_padding, **UNCACHED),
    "padding without position_ids": checks.check_padding_without_positions,
    "right padding": checks.check_right_padding,
    "beams": checks.check_beams,
    "beams, static": partial(checks.check_beams, **STATIC),
    "chunked prefill": checks.check_chunked_prefill,
    "chunked prefill, static": partial(checks.check_chunked_prefill, **STATIC),
    "prompt lookup": checks.check_prompt_lookup,
    "assistant": checks.check_assistant,
    "every split": checks.check_splits,
    "static cache in pieces": checks.check_static_cache_in_pieces,
    "crop": checks.check_crop,
    "selection": checks.check_selection,
    "documents": checks.check_documents,
    "documents continued": checks.check_documents_continued,
}
ABSOLUTE = "padding without position_ids"  # a model with learned positions needs them
every_check = pytest.mark.parametrize("check", CHECKS)


ALL = MODELS | {
    "GPT-2, eager": partial(shifted_gpt2, attention="eager"),
    "Llama, eager": partial(tiny_model, attention="eager", sliding_window=3, shift_window=3),
}


@cache
def model_of(name: str) -> PreTrainedModel:
    return ALL[name](torch.float64)


@every_check
@pytest.mark.parametrize("name", ALL)
def test_against_the_reference(name: str, check: str):
    if "GPT-2" not in name or check != ABSOLUTE:
        CHECKS[check](model_of(name))


ARCEE = rotary_family(modeling_arcee, "ArceeAttention", "ArceeModel", "ArceeForCausalLM")


@pytest.fixture
def _in_the_list(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adding, "FAMILIES", (*adding.FAMILIES, ARCEE))


def arcee(attention: str = "sdpa") -> PreTrainedModel:
    model = ArceeForCausalLM(ArceeConfig(**SIZES, head_dim=12))
    model.set_attn_implementation(attention)
    randomize(model)
    model.generation_config.pad_token_id = PAD
    return model.eval()


@pytest.mark.usefixtures("_in_the_list")
@pytest.mark.parametrize("options", [{}, {"targets": ("q", "k", "v"), "window": 3}], ids=["paper", "queries too"])
@every_check
def test_another_family(options: dict[str, Any], check: str):
    model = adding.add_kv_shift(arcee(), ShiftOptions(init="identity", **options)).double()
    randomize(model)
    CHECKS[check](model)


@pytest.mark.usefixtures("_in_the_list")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_identity_is_the_family_itself_bit_for_bit(attention: str):
    model, ids = arcee(attention), random_tokens(2, 9)
    before = checks.logits_of(model, ids)
    assert type(adding.add_kv_shift(model)).__name__ == "KVShiftArceeForCausalLM"
    torch.testing.assert_close(checks.logits_of(model, ids), before, rtol=0, atol=0)
