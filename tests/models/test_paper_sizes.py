"""The paper's sizes can be built without memory, with the parameter counts of its tables."""

import pytest
import torch

from kvshift.models.llama import SIZES, KVShiftLlamaForCausalLM, size_config

# Non-embedding and total parameters without shift, for the paper's names of its models, and those that the shift
# adds: four numbers for each KV head of each layer.
COUNTS = {
    "0.2B": (103_937_280, 142_570_752, 192),
    "1.5B": (1.417e9, 1.564e9, 1_792),
    "2.9B": (2.643e9, 2.888e9, 512),
    "6.7B": (6.476e9, 6.771e9, 4_096),
    "13B": (12.688e9, 13.057e9, 6_400),
    "19B": (18.422e9, 19.012e9, 768),
}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", SIZES)
def test_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        vanilla = KVShiftLlamaForCausalLM(size_config(name, shift_targets=()))
        shifted = KVShiftLlamaForCausalLM(size_config(name))
    body, total, added = COUNTS[name]
    embeddings = {id(p): p.numel() for p in (vanilla.model.embed_tokens.weight, vanilla.lm_head.weight)}
    unit = 1 if isinstance(total, int) else 1e6  # the larger ones are known to three decimals of a billion
    assert round(count(vanilla) / unit) == round(total / unit)
    assert round((count(vanilla) - sum(embeddings.values())) / unit) == round(body / unit)
    assert count(shifted) - count(vanilla) == added
    assert added == 4 * shifted.config.num_key_value_heads * shifted.config.num_hidden_layers


def test_head_size_is_128_in_the_large_models_and_64_in_the_small() -> None:
    assert {name: size_config(name).head_dim for name in SIZES} == dict.fromkeys(SIZES, 128) | {"0.2B": 64}


def test_the_base_of_rope() -> None:
    """The paper's Table 16 has it for the large models, BlaGPT's configuration at commit e2c2d98 for the small one."""
    found = {name: size_config(name).rope_parameters["rope_theta"] for name in SIZES}
    assert found == dict.fromkeys(SIZES, 100_000.0) | {"0.2B": 10_000.0}


def test_unknown_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"name must be one of 0\.2B, .*; got '3B'"):
        size_config("3B")
