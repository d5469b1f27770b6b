"""The JSON file of `--model.config`: every field must be known, and single options override it. Frozen coefficients."""

import json

import pytest
import torch

from kvshift.models.llama import KVShiftLlamaConfig
from kvshift_lab.core.errors import LabError
from kvshift_lab.variants.building import build_model, describe, freeze_shift, llama_config
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.variant import shift_layers

# The fields of Meta's files on the hub, including older ones.
LLAMA = {
    "_name_or_path": "meta-llama/small",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 24,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "vocab_size": 97,
}


def described(tmp_path, values, **options):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values))
    return llama_config(ModelConfig(config=path, **options), vocab_size=1, sequence_length=64)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("hiden_size", "did you mean hidden_size?"),
        ("num_layers", "did you mean num_hidden_layers?"),
        ("n_embd", "known: .*hidden_size"),
        ("quantization_config", "known: .*hidden_size"),
    ],
)
def test_an_unknown_field_is_an_error(tmp_path, field, said):
    with pytest.raises(LabError, match=rf"model\.config: .*model\.json has an unknown field '{field}'; {said}"):
        described(tmp_path, {**LLAMA, field: 64})


def test_files_of_transformers_are_read(tmp_path):
    config = described(tmp_path, LLAMA)
    assert (config.hidden_size, config.rms_norm_eps) == (24, 1e-5)
    assert config.rope_parameters == {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0}
    saved = KVShiftLlamaConfig(**config.to_dict() | {"shift_window": 3, "sliding_window": 8})
    saved.save_pretrained(tmp_path)
    again = llama_config(ModelConfig(config=tmp_path / "config.json"), vocab_size=1, sequence_length=64)
    assert again.to_diff_dict() == saved.to_diff_dict()


@pytest.mark.parametrize("old", [True, False], ids=["rope_scaling", "rope_parameters"])
def test_rope_theta_alone_leaves_the_scaling_of_the_file(tmp_path, old):
    rope = {"factor": 8.0, "rope_type": "linear"}
    values = {name: value for name, value in LLAMA.items() if not name.startswith("rope")}
    fields = {"rope_scaling": rope, "rope_theta": 5e5} if old else {"rope_parameters": {**rope, "rope_theta": 5e5}}
    config = described(tmp_path, {**values, **fields}, rope_theta=3e4)
    assert config.rope_parameters == {**rope, "rope_theta": 3e4}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"head_dim": 0}, r"model\.head_dim must be a whole number from 1 to 2\*\*31 - 1, got 0"),
        ({"vocab_size": "97"}, r"model\.vocab_size must be a whole number .*, got '97'"),
        ({"rms_norm_eps": -1.0}, r"model\.rms_norm_eps must be between 0 and 1, got -1\.0"),
        ({"rms_norm_eps": float("nan")}, r"model\.rms_norm_eps must be between 0 and 1, got nan"),
        ({"attention_dropout": 2.0}, r"model\.attention_dropout must be between 0 and 1, got 2\.0"),
        ({"hidden_act": "zwiglu"}, r"model\.hidden_act must be one of .*silu.*, got 'zwiglu'"),
        ({"rope_theta": -1.0}, r"model\.rope_theta must be more than 0 and finite, got -1\.0"),
        ({"hidden_size": None}, r"options under model are invalid: Field 'hidden_size' expected int, got None"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_an_error_in_our_words(tmp_path, values, said):
    with pytest.raises(LabError, match=said):
        described(tmp_path, {**LLAMA, **values})


def test_coefficients_of_earlier_tokens_stay_while_that_of_the_current_one_learns():
    options = ModelConfig(hidden_size=16, num_attention_heads=2, shift_window=3, freeze_shift_lags=True)
    model = build_model(describe(options, vocab_size=20, length=8), seed=0)
    freeze_shift(model, options)
    tokens = torch.arange(16).view(2, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    for layer in shift_layers(model):
        for coefficients in layer.parameters():
            assert coefficients.grad is not None
            assert coefficients.grad[:, 0].all()
            assert not coefficients.grad[:, 1:].any()


def test_lags_of_a_gate_cannot_be_frozen_alone():
    options = ModelConfig(hidden_size=16, num_attention_heads=2, shift_constraint="gate", freeze_shift_lags=True)
    model = build_model(describe(options, vocab_size=20, length=8), seed=0)
    with pytest.raises(LabError, match=r"model\.freeze_shift_lags must be left out with shift_constraint gate"):
        freeze_shift(model, options)
