"""Models that cannot decode with a cache say so, and generate without one."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from huggingface_hub.dataclasses import strict

from kvshift.lab.variants.uncached import (
    UncachedConfig,
    UncachedGeneration,
    UncachedLlamaModel,
    become,
    decodes_with_cache,
)
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM


@strict
class PlainConfig(UncachedConfig, KVShiftLlamaConfig):
    model_type = "kvshift_toy_uncached"
    loaded_by: ClassVar[str] = "tests.lab.variants.test_uncached.Plain"


class Plain(UncachedGeneration, KVShiftLlamaForCausalLM):
    config_class = PlainConfig

    def __init__(self, config: PlainConfig) -> None:
        super().__init__(config)
        become(self.model, UncachedLlamaModel)


def test_it_generates_without_a_cache_and_refuses_one() -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = Plain(PlainConfig(vocab_size=31, **sizes)).eval()
    cached = KVShiftLlamaForCausalLM(KVShiftLlamaConfig(vocab_size=31, **sizes)).eval()
    cached.load_state_dict(model.state_dict())
    assert (decodes_with_cache(model), decodes_with_cache(cached)) == (False, True)
    ids, how = torch.tensor([[3, 1, 4]]), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **how), cached.generate(ids, **how))
    said = "use_cache must be False .*: kvshift_toy_uncached does not decode with a cache"
    with pytest.raises(ValueError, match=said):
        model.generate(ids, use_cache=True, **how)
    with pytest.raises(ValueError, match=said):
        model(input_ids=ids, use_cache=True)
