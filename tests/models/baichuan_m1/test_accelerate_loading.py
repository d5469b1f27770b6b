"""`accelerate.load_checkpoint_and_dispatch` loads the released layout; what it cannot load is refused by name."""

from __future__ import annotations

import json

import accelerate
import pytest
import torch

from kvshift.models.baichuan_m1 import BaichuanM1Config, BaichuanM1ForCausalLM

from ...covering import covering
from ..llama.checks import logits_of
from ..llama.tiny import random_tokens
from .test_layout import EARLIER, with_names
from .tiny import CONFIG, checkpoint, config_with, load, write

IDS = random_tokens(2, 9)


def empty(config=CONFIG, meta=True):
    with accelerate.init_empty_weights() if meta else torch.device("cpu"):
        model = BaichuanM1ForCausalLM(BaichuanM1Config(**config))
    model.tie_weights()
    return model


# No "made, tied": accelerate keeps the old values of tied models that are not empty, also of transformers' own.
@covering(
    start={"empty": (True, False), "made": (False, False), "empty, tied": (True, True)},
    names={"released": {}, "earlier": EARLIER},
    options=[{}, {"force_hooks": True}, {"dtype": torch.bfloat16}],
)
def test_the_logits_are_those_of_from_pretrained(tmp_path, start, names, options):
    meta, tied = start
    config = config_with(tie_word_embeddings=tied)
    write(tmp_path, with_names(checkpoint(config), names), config, shards=3)
    expected = logits_of(load(tmp_path, dtype=options.get("dtype", torch.float32)), IDS)
    model = accelerate.load_checkpoint_and_dispatch(empty(config, meta), tmp_path, device_map={"": "cpu"}, **options)
    torch.testing.assert_close(logits_of(model.eval(), IDS), expected, rtol=0, atol=0)
    coefficients = [p for name, p in model.named_parameters() if ".shift." in name]
    assert len(coefficients) == 6
    assert {p.dtype for p in coefficients} == {torch.float32}
    assert all(p.requires_grad for p in coefficients)
    assert (model.lm_head.raw is model.model.embed_tokens.weight) == tied


def test_a_bin_file_and_no_device_map(tmp_path):
    expected = logits_of(load(write(tmp_path), dtype=torch.float32), IDS)
    torch.save(checkpoint(), tmp_path / "weights.bin")
    for where in (str(tmp_path / "weights.bin"), str(tmp_path)):
        for device_map in ({"": "cpu"}, None):
            model = accelerate.load_checkpoint_and_dispatch(empty(meta=False), where, device_map=device_map)
            torch.testing.assert_close(logits_of(model.eval(), IDS), expected, rtol=0, atol=0)


def test_what_would_not_be_found_is_refused(tmp_path):
    weights, name = checkpoint(), "model.layers.1.self_attn.conv_v"
    write(tmp_path, weights)
    with pytest.raises(ValueError, match=r'must not have "disk" .* Use from_pretrained'):
        accelerate.load_checkpoint_and_dispatch(
            empty(), tmp_path, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path / "off"
        )
    write(tmp_path, weights | {name: torch.ones(1, 1, 3, 1, 3)})
    with pytest.raises(ValueError, match=rf"{name} must have the shape \(1, 1, 3, 1, 2\); got \(1, 1, 3, 1, 3\)"):
        accelerate.load_checkpoint_and_dispatch(empty(), tmp_path, device_map={"": "cpu"})
    other = name.replace("conv_v", "V")
    write(tmp_path, weights | {other: weights[name].clone()}, shards=3)
    (tmp_path / "model.safetensors").unlink()
    assert other in json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    with pytest.raises(ValueError, match=f"the checkpoint has both .*({name}|{other}).*, two names of one weight"):
        accelerate.load_checkpoint_and_dispatch(empty(), tmp_path, device_map={"": "cpu"})
