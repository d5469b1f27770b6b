"""The body serves another rotary family in a few lines: Mistral, as an example of how one is added."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from huggingface_hub.dataclasses import strict
from transformers import MistralConfig, MistralForCausalLM
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralModel,
    MistralPreTrainedModel,
    eager_attention_forward,
)

from kvshift import KVShift, ShiftOptions
from kvshift.models.configuration import ShiftConfig
from kvshift.models.decoder import RotaryDecoder, ShiftedAttention, ShiftedPreTrainedModel
from kvshift.models.generation import ShiftedGeneration

from .llama import checks
from .llama.reference import reference_logits
from .llama.tiny import PAD, SIZES, random_tokens, randomize


@strict
class ToyConfig(ShiftConfig, MistralConfig):
    loaded_by: ClassVar[str] = "tests"
    model_type = "kvshift_toy"
    attention_bias = mlp_bias = qk_norm = False  # for the reference

    shift_targets: list[str] | tuple[str, ...] = ("k", "v")
    shift_window: int = 2
    shift_constraint: str = "free"
    shift_init: str = "uniform"
    use_cache: bool | dict[str, bool] = True
    sliding_window: int | None = None


class ToyAttention(ShiftedAttention, MistralAttention):
    eager_attention = staticmethod(eager_attention_forward)

    def __init__(self, config: ToyConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sliding_window = config.sliding_window
        self.shift = KVShift(
            config.num_key_value_heads,
            ShiftOptions.of(config),
            num_heads=config.num_attention_heads,
        )


class ToyPreTrainedModel(ShiftedPreTrainedModel, MistralPreTrainedModel):
    config: ToyConfig
    config_class = ToyConfig
    _can_record_outputs: ClassVar = {"attentions": ToyAttention}


class ToyModel(RotaryDecoder, ToyPreTrainedModel, MistralModel):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            layer.self_attn = ToyAttention(config, i)
        self.post_init()


class ToyForCausalLM(ShiftedGeneration, ToyPreTrainedModel, MistralForCausalLM):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.model = ToyModel(config)
        self.post_init()


def toy(attention: str = "sdpa", **options: Any) -> ToyForCausalLM:
    fields = {name: value for name, value in SIZES.items() if name != "attention_bias"}
    model = ToyForCausalLM(ToyConfig(**{**fields, **options}))
    model.set_attn_implementation(attention)
    randomize(model)
    model.generation_config.pad_token_id = PAD
    return model.eval()


VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "queries too, window 3": {"shift_targets": ["q", "k", "v"], "shift_window": 3},
    "sliding window": {"sliding_window": 5},
}
CHECKS: list[Callable] = [
    checks.check_forward,
    checks.check_decoding,
    partial(checks.check_decoding, cache_implementation="static"),
    checks.check_left_padding,
    checks.check_chunked_prefill,
    checks.check_documents,
    checks.check_crop,
]


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: getattr(check, "__name__", "static"))
def test_another_family(options: dict, check: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(checks.REFERENCES, "kvshift_toy", reference_logits)
    check(toy(**options).double())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("sliding", [None, 5])
def test_the_identity_is_the_family_itself_bit_for_bit(sliding: int | None, attention: str):
    model, ids = toy(attention, sliding_window=sliding), random_tokens(2, 9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".shift." in name:
                parameter.copy_(torch.tensor([1.0, 0.0]).expand_as(parameter))
    fields = {name: value for name, value in SIZES.items() if name != "attention_bias"}
    plain = MistralForCausalLM(MistralConfig(**fields, sliding_window=sliding)).eval()
    plain.set_attn_implementation(attention)
    plain.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(checks.logits_of(model, ids), checks.logits_of(plain, ids), rtol=0, atol=0)
