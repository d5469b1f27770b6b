"""The configuration: rejected values, derived fields, and saving and loading."""

import json

import pytest
from transformers import AutoConfig, GenerationConfig, LlamaConfig, MistralConfig

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

from .checks import check_decoding, new_tokens_of
from .tiny import SIZES, random_tokens, tiny_config, tiny_model

# A file as version 0.1.0 wrote it; such files must always load.
FILE_0_1_0 = {
    "architectures": ["KVShiftLlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 24,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "kvshift_llama",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "qk_norm": True,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "shift_constraint": "free",
    "shift_init": "identity",
    "shift_targets": ["k", "v"],
    "shift_window": 3,
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 97,
}


@pytest.mark.parametrize(
    ("field", "value", "expectation"),
    [
        ("shift_targets", ["k", "w"], 'a sequence of "q", "k", "v"'),
        ("shift_window", "2", "an integer of at least 2"),
        ("shift_constraint", "softmax", '"free", "gate" or "clamp"'),
        ("shift_init", "zeros", '"uniform" or "identity"'),
        ("sliding_window", 0, "an integer of at least 2, or None"),
        ("sliding_window", 1, "an integer of at least 2, or None"),  # transformers' dynamic cache fails at 1
        ("sliding_window", 2.5, "an integer of at least 2, or None"),
        ("use_cache", 3, "True or False"),
        ("layer_types", ["full_attention"] * 2, r"\['hybrid', 'hybrid'\]"),
    ],
)
def test_a_bad_value_is_named_with_its_field_and_what_is_expected(field: str, value, expectation: str):
    with pytest.raises(ValueError, match=f"(?s){field} must .*{expectation}") as raised:
        tiny_config(**{field: value})
    assert str(value) in str(raised.value) or repr(value) in str(raised.value)


@pytest.mark.parametrize("other", [LlamaConfig, MistralConfig])
def test_fields_of_other_families_are_not_taken_for_misspelt(other: type):
    """Configurations are often made from those of pretrained models."""
    fields = other(**SIZES).to_dict()
    fields.pop("layer_types", None)
    KVShiftLlamaConfig(**fields, sliding_windows_unrelated_to_llama=1, max_sequence_length=7)


@pytest.mark.parametrize(
    ("options", "layer_type"),
    [
        ({}, "hybrid"),
        ({"sliding_window": 7}, "hybrid_sliding"),
        ({"shift_targets": ()}, "full_attention"),
        ({"shift_targets": [], "sliding_window": 7}, "sliding_attention"),
    ],
)
def test_layer_types_follow_from_the_other_fields(options: dict, layer_type: str):
    config = tiny_config(**options, num_hidden_layers=3)
    assert config.layer_types == [layer_type] * 3
    assert tiny_config(**options, num_hidden_layers=3, layer_types=[layer_type] * 3).layer_types == config.layer_types
    config.num_hidden_layers = 5
    assert config.layer_types == [layer_type] * 5
    config.layer_types = [layer_type] * 5  # PEFT's Shadow does that
    with pytest.raises(ValueError, match="layer_types must be left out or match the other fields"):
        config.layer_types = [layer_type] * 3


def test_fields_changed_while_loading_take_effect(tmp_path):
    tiny_model(sliding_window=9).save_pretrained(tmp_path)
    shorter = KVShiftLlamaForCausalLM.from_pretrained(tmp_path, num_hidden_layers=1, sliding_window=None)
    assert shorter.config.layer_types == ["hybrid"]
    check_decoding(shorter.double())
    narrower = KVShiftLlamaForCausalLM.from_pretrained(tmp_path, sliding_window=4, dtype="float64")
    check_decoding(narrower)
    vanilla = KVShiftLlamaForCausalLM.from_pretrained(tmp_path, shift_targets=[], dtype="float64")
    check_decoding(vanilla)
    assert new_tokens_of(vanilla, random_tokens(1, 5)).tolist() != new_tokens_of(narrower, random_tokens(1, 5)).tolist()


def written(config: KVShiftLlamaConfig) -> dict:
    """Return the contents of its file, without origin and version."""
    fields = json.loads(config.to_json_string())
    return {name: value for name, value in fields.items() if name not in ("_name_or_path", "transformers_version")}


@pytest.mark.parametrize(
    "options",
    [{}, {"shift_targets": ("v", "q"), "shift_window": 4, "sliding_window": 7}, {"shift_targets": ()}],
    ids=str,
)
def test_a_configuration_survives_its_file(tmp_path, options: dict):
    config = tiny_config(**options)
    config.save_pretrained(tmp_path)
    for loaded in (KVShiftLlamaConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is KVShiftLlamaConfig
        assert written(loaded) == written(config)
        assert loaded.layer_types == config.layer_types


def test_a_file_of_an_earlier_version_loads(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FILE_0_1_0))
    config = AutoConfig.from_pretrained(tmp_path)
    for field, value in FILE_0_1_0.items():
        assert getattr(config, field) == value, field


def test_every_field_of_that_file_is_still_written():
    fields = written(KVShiftLlamaConfig(**FILE_0_1_0))
    fields["use_cache"] = fields["use_cache"]["kv_shift: load it with kvshift.models.llama.KVShiftLlamaForCausalLM"]
    assert {field: fields.get(field) for field in FILE_0_1_0} == FILE_0_1_0


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_reads_whether_there_is_a_cache(use_cache: bool):
    config = KVShiftLlamaConfig(use_cache=use_cache)
    assert GenerationConfig.from_model_config(config).use_cache is use_cache


def test_defaults_are_the_papers():
    config = KVShiftLlamaConfig()
    assert (config.shift_targets, config.shift_window) == (["k", "v"], 2)
    assert (config.shift_constraint, config.shift_init) == ("free", "uniform")
    assert (config.qk_norm, config.sliding_window) == (False, None)
