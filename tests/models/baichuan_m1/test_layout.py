"""The released layout: every name is used, a round trip changes no bit, and unsuitable files are refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import kvshift.models.baichuan_m1 as baichuan_m1
from kvshift.models.baichuan_m1 import BaichuanM1Config, BaichuanM1ForCausalLM, BaichuanM1Model

from ...covering import covering
from ..llama.checks import logits_of
from ..llama.tiny import random_tokens
from .tiny import CONFIG, checkpoint, config_with, load, shapes, write

EARLIER = {"conv_k": "K", "conv_v": "V"}
EARLIER_OF = {earlier: name for name, earlier in EARLIER.items()}


def files_of(folder):
    """Return all tensors of a folder, from all of its files."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_bits(got, expected):
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        integers = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
        assert torch.equal(got[name].view(integers), tensor.view(integers)), name


def with_names(weights, names):
    """Return the weights with the last parts of their names replaced."""
    renamed = {}
    for name, tensor in weights.items():
        start, _, last = name.rpartition(".")
        renamed[f"{start}.{names.get(last, last)}"] = tensor
    return renamed


@covering(
    dtype=[torch.float32, torch.bfloat16], shards=[1, 3], names={"released": {}, "earlier": EARLIER}, tied=[False, True]
)
def test_a_round_trip_changes_no_bit(tmp_path, dtype, shards, names, tied):
    """Not even names, except those of the earlier layout."""
    config = config_with(torch_dtype=str(dtype).removeprefix("torch."), tie_word_embeddings=tied)
    weights = checkpoint(config, dtype=dtype)
    (tmp_path / "read").mkdir()
    write(tmp_path / "read", with_names(weights, names), config, shards=shards)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "read", dtype="auto")
    assert model.dtype == dtype
    model.save_pretrained(tmp_path / "saved", max_shard_size="1GB" if shards == 1 else "60KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > (shards > 1)
    assert_same_bits(files_of(tmp_path / "saved"), weights)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    ids = random_tokens(1, 9)
    torch.testing.assert_close(logits_of(again, ids), logits_of(model, ids), rtol=0, atol=0)


def test_the_saved_configuration_is_that_which_was_read(tmp_path):
    load(write(tmp_path)).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    assert {name: saved.get(name) for name in CONFIG if name != "torch_dtype"} == {
        name: value for name, value in CONFIG.items() if name != "torch_dtype"
    }
    assert AutoConfig.from_pretrained(tmp_path / "saved").layer_types == [
        "full_attention",
        "sliding_attention",
        "full_attention",
    ]


def test_a_model_that_was_never_loaded_is_saved_in_the_released_layout(tmp_path):
    model = AutoModelForCausalLM.from_config(BaichuanM1Config(**CONFIG))
    model.save_pretrained(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in files_of(tmp_path).items()} == shapes(CONFIG)
    for mixing in (layer.self_attn.shift for layer in model.model.layers):
        torch.testing.assert_close(mixing.alpha.sum(1), torch.ones(len(mixing.alpha)))


def test_coefficients_that_bfloat16_cannot_hold_are_saved_in_float32(tmp_path):
    weights = checkpoint(dtype=torch.bfloat16)
    model = load(write(tmp_path, weights, config_with(torch_dtype="bfloat16")), dtype="auto")
    with torch.no_grad():
        model.model.layers[2].self_attn.shift.alpha += 2**-12
    model.save_pretrained(tmp_path / "saved")
    saved = files_of(tmp_path / "saved")
    changed = saved.pop("model.layers.2.self_attn.conv_k")
    expected = weights.pop("model.layers.2.self_attn.conv_k")
    assert changed.dtype == torch.float32
    torch.testing.assert_close(changed, expected.float() + 2**-12, rtol=0, atol=0)
    assert_same_bits(saved, weights)


def test_index_0_is_the_previous_token(tmp_path):
    weights = checkpoint()
    weights["model.layers.1.self_attn.conv_k"][0, 0, :, 0] = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    shift = load(write(tmp_path, weights)).model.layers[1].self_attn.shift
    assert shift.alpha.tolist() == [[2, 1], [4, 3], [6, 5]]  # column 0 is the current token


def test_every_weight_of_the_layout_counts(tmp_path):
    weights, ids = checkpoint(), random_tokens(1, 9)
    (tmp_path / "whole").mkdir()
    before = logits_of(load(write(tmp_path / "whole", weights)), ids)
    model = load(tmp_path / "whole")
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter[0] += 0.5  # one element or row
            if "embed_tokens" in name:
                parameter[ids[0, 0]] += 0.5
        assert (logits_of(model, ids) - before).abs().max() > 1e-4, name
        with torch.no_grad():
            parameter.copy_(kept)
    assert len(list(model.named_parameters())) == len(weights)


def test_load_state_dict_takes_the_released_names_too(tmp_path):
    """`Trainer` calls it when it resumes from a folder that `save_pretrained` wrote."""
    model = BaichuanM1ForCausalLM(BaichuanM1Config(**CONFIG)).double().eval()
    weights = {name: tensor.double() for name, tensor in checkpoint().items()}
    names = set(weights)
    model.load_state_dict(weights)
    assert set(weights) == names
    ids = random_tokens(1, 9)
    torch.testing.assert_close(logits_of(model, ids), logits_of(load(write(tmp_path)), ids), rtol=0, atol=0)
    model.load_state_dict(model.state_dict())


FIRST, LAST = "model.layers.0.self_attn.conv_k", "model.layers.2.mlp.down_proj.weight"
WEIGHTS = {
    "missing": (lambda w: w.pop(FIRST), f"BaichuanM1ForCausalLM: it lacks {FIRST}$"),
    "two missing": (lambda w: (w.pop(FIRST), w.pop(LAST)), f"it lacks {FIRST}, {LAST}$"),
    "no head": (lambda w: w.pop("lm_head.weight"), "it lacks lm_head.weight$"),
    "unknown": (lambda w: w.update({"model.extra": torch.ones(2)}), "it has unknown model.extra$"),
    "bias": (lambda w: w.update({"lm_head.bias": torch.ones(61)}), "it has unknown lm_head.bias$"),
    "misspelt": (
        lambda w: w.update({"model.layers.0.self_attn.conv_kk": w.pop(FIRST)}),
        f"it lacks {FIRST}; has unknown model.layers.0.self_attn.conv_kk$",
    ),
    "unpacked": (
        lambda w: w.update({"model.layers.0.self_attn.q_proj.weight": w.pop("model.layers.0.self_attn.W_pack.weight")}),
        "it lacks model.layers.0.self_attn.W_pack.weight; has unknown model.layers.0.self_attn.q_proj.weight$",
    ),
    "shape": (
        lambda w: w.update({LAST: torch.ones(48, 31)}),
        rf"it has the wrong shape for {LAST} \(48, 31\) where \(48, 29\) was expected$",
    ),
    "window 3": (lambda w: w.update({FIRST: torch.ones(1, 1, 2, 1, 3)}), rf"wrong shape for {FIRST} \(2, 3\) where"),
    "heads": (lambda w: w.update({FIRST: torch.ones(1, 1, 4, 1, 2)}), rf"wrong shape for {FIRST} \(4, 2\) where"),
    "our shape": (lambda w: w.update({FIRST: torch.ones(2, 2)}), rf"wrong shape for {FIRST} \(4,\) where"),
    "5 axes": (lambda w: w.update({FIRST: torch.ones(2, 1, 1, 1, 2)}), rf"wrong shape for {FIRST} \(2, 1, 1, 1, 2\)"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_other_weights_are_refused(tmp_path, case):
    change, message = WEIGHTS[case]
    weights = checkpoint()
    change(weights)
    write(tmp_path, weights)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("name", "earlier"), [("0.self_attn.conv_k", "K"), ("2.self_attn.conv_v", "V")])
def test_both_names_of_a_convolution_are_refused(tmp_path, name, earlier, shards):
    weights, name = checkpoint(), f"model.layers.{name}"
    weights[name.replace(EARLIER_OF[earlier], earlier)] = weights[name].clone()
    with pytest.raises(ValueError, match=rf"it has the wrong shape for {name} \(2, 4\) where \(2, 2\) was expected$"):
        load(write(tmp_path, weights, shards=shards))
    with pytest.raises(ValueError, match=f"the weights have {name} under two of its names"):
        BaichuanM1ForCausalLM(BaichuanM1Config(**CONFIG)).load_state_dict(weights)


def test_files_that_are_not_whole_are_refused(tmp_path):
    write(tmp_path, shards=3)
    shards = sorted(tmp_path.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        shards[1].write_bytes(whole[:length])
        with pytest.raises(OSError, match=f"a safetensors file of {tmp_path} is cut off or damaged"):
            load(tmp_path)
    shards[1].unlink()
    with pytest.raises(OSError, match=shards[1].name):
        load(tmp_path)


LINEAR = {"rope_type": "linear", "factor": 1.0}
CONFIGS = [
    ("sliding_window_layers", None, "must be a list .* got None"),
    ("sliding_window_layers", [1, 3], r"different integers from 0 to 2, got \[1, 3\]"),
    ("sliding_window_layers", [1, 1], r"different integers from 0 to 2, got \[1, 1\]"),
    ("sliding_window_layers", [True, False], r"a list of different integers .*, got \[True, False\]"),
    ("sliding_window_layers", "1", "a list of different integers .*, got '1'"),
    ("sliding_window", None, "must be an integer of at least 2 .* got None"),
    ("sliding_window", 1, "must be an integer of at least 2 .* got 1"),
    ("sliding_window", 4.0, "must be an integer of at least 2 .* got 4.0"),
    ("sliding_window", True, "must be an integer of at least 2 .* got True"),
    ("conv_window", 2.0, "must be 2.*got 2.0"),
    ("conv_window", 3, "must be 2.*got 3"),
    ("num_swa_attention_heads", 6.0, "must be an integer of .* got 6.0"),
    ("num_swa_key_value_heads", 0, "must be an integer of .* got 0"),
    ("num_swa_attention_heads", 5, r"hidden_size \(48\) must be an even multiple of the 5 query heads"),
    ("num_swa_key_value_heads", 4, "of the 6 query heads of layer 1, and these a multiple of its 4"),
    ("num_attention_heads", 16, "an even multiple of the 16 query heads of layer 0"),
    ("head_dim", 16, "must be left out or .* = 12; got 16"),
    ("attention_bias", True, "must be False.*got True"),
    ("layer_types", ["full_attention"] * 3, r"must be left out or match .*; got \['full_attention', 'full_attention'"),
    ("rope_theta", None, "must be given, here or in rope_parameters; got neither"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 10.0}, r"\(10.0\); got 1000.0"),
    ("rope_parameters", LINEAR | {"partial_rotary_factor": 0.5}, "must rotate whole heads, .*; 6 of 12 dimensions"),
]


@pytest.mark.parametrize(("field", "value", "words"), CONFIGS)
def test_other_configurations_are_refused(tmp_path, field, value, words):
    write(tmp_path, checkpoint(), config_with(**{field: value}))
    named = "" if "query heads" in words else f"{field} .*"
    with pytest.raises(Exception, match=named + words) as caught:
        load(tmp_path)
    assert isinstance(caught.value, ValueError) or isinstance(caught.value.__cause__, ValueError)


def test_the_decoder_knows_its_own_weights_alone(tmp_path):
    weights = {name: tensor for name, tensor in checkpoint().items() if name != LAST}
    with pytest.raises(ValueError, match=r"BaichuanM1Model: it lacks layers\.2\.mlp.down_proj.weight$"):
        BaichuanM1Model.from_pretrained(pretrained_model_name_or_path=write(tmp_path, weights))


def test_registering_leaves_a_type_of_transformers_alone(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("registered")

    for name in ("register_model_type", "register_checkpoint_conversion_mapping"):
        monkeypatch.setattr(baichuan_m1, name, refuse)
    monkeypatch.setitem(CONFIG_MAPPING_NAMES, "baichuan_m1", "BaichuanM1Config")
    assert baichuan_m1.register() is False


def test_registering_twice_is_no_error():
    assert baichuan_m1.register() is True
    fields = {name: value for name, value in CONFIG.items() if name != "model_type"}
    assert type(AutoConfig.for_model("baichuan_m1", **fields)) is BaichuanM1Config
