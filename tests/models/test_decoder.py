"""The body serves another rotary family in a few lines: Arcee, as an example of how one is added."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ArceeConfig, ArceeForCausalLM, PreTrainedModel
from transformers.models.arcee import modeling_arcee

from kvshift import ShiftOptions
from kvshift.models.retrofit import adding
from kvshift.models.retrofit.family import rotary_family

from .llama import checks
from .llama.tiny import PAD, random_tokens, randomize
from .retrofit.tiny_families import SIZES, truth_of

ARCEE = rotary_family(modeling_arcee, "ArceeAttention", "ArceeModel", "ArceeForCausalLM")


@pytest.fixture(autouse=True)
def _in_the_list(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adding, "FAMILIES", (*adding.FAMILIES, ARCEE))


def arcee(attention: str = "sdpa") -> PreTrainedModel:
    model = ArceeForCausalLM(ArceeConfig(**SIZES, head_dim=12))
    model.set_attn_implementation(attention)
    randomize(model)
    model.generation_config.pad_token_id = PAD
    return model.eval()


def logits_of_truth(weights: Any, config: Any, tokens: list[int], *, model: PreTrainedModel) -> Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


CHECKS: list[Callable] = [
    checks.check_forward,
    checks.check_decoding,
    partial(checks.check_decoding, cache_implementation="static"),
    checks.check_left_padding,
    checks.check_chunked_prefill,
    checks.check_documents,
    checks.check_crop,
]
VARIANTS: dict[str, dict[str, Any]] = {"paper": {}, "queries too": {"targets": ("q", "k", "v"), "window": 3}}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: getattr(check, "__name__", "static"))
def test_another_family(options: dict, check: Callable, monkeypatch: pytest.MonkeyPatch):
    model = adding.add_kv_shift(arcee(), ShiftOptions(init="identity", **options)).double()
    randomize(model)
    monkeypatch.setitem(checks.REFERENCES, "kvshift_arcee", partial(logits_of_truth, model=truth_of(model)))
    check(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_identity_is_the_family_itself_bit_for_bit(attention: str):
    model, ids = arcee(attention), random_tokens(2, 9)
    before = checks.logits_of(model, ids)
    assert type(adding.add_kv_shift(model)).__name__ == "KVShiftArceeForCausalLM"
    torch.testing.assert_close(checks.logits_of(model, ids), before, rtol=0, atol=0)
