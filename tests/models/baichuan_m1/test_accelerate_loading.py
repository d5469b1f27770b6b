"""Accelerate loads weights by name: what it would skip is loaded by other means, or refused by name."""

from __future__ import annotations

import accelerate
import pytest
import torch

from kvshift.models.baichuan_m1 import BaichuanM1Config, BaichuanM1ForCausalLM

from ...covering import covering
from ..llama.checks import logits_of
from ..llama.tiny import random_tokens
from .tiny import CONFIG, checkpoint, load, write

IDS = random_tokens(2, 9)
REFUSAL = r"would not find conv_k, conv_v and lm_head.weight, .*: use from_pretrained\(folder, device_map="


def made(empty):
    with accelerate.init_empty_weights() if empty else torch.device("cpu"):
        return BaichuanM1ForCausalLM(BaichuanM1Config(**CONFIG))


@pytest.mark.parametrize("binary", [False, True])
def test_without_a_device_map_all_weights_are_loaded(tmp_path, binary):
    expected = logits_of(load(write(tmp_path, shards=1 if binary else 3), dtype=torch.float32), IDS)
    if binary:
        torch.save(checkpoint(), tmp_path / "weights.bin")
    path = str(tmp_path / "weights.bin") if binary else tmp_path
    model = accelerate.load_checkpoint_and_dispatch(made(empty=False), path)
    torch.testing.assert_close(logits_of(model.eval(), IDS), expected, rtol=0, atol=0)


@covering(
    empty=[True, False],
    device_map=[{"": "cpu"}, {"model": "cpu", "lm_head": "disk"}, "auto"],
    options=[{}, {"force_hooks": True}, {"dtype": torch.bfloat16}],
)
def test_a_device_map_is_refused(tmp_path, empty, device_map, options):
    write(tmp_path)
    with pytest.raises(ValueError, match=REFUSAL):
        accelerate.load_checkpoint_and_dispatch(
            made(empty), tmp_path, device_map=device_map, offload_folder=tmp_path / "off", **options
        )


IN_THE_MIDDLE = {f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb", "layers.0", "layers.2")}


@pytest.mark.parametrize(
    "device_map",
    [
        "auto",
        {"": "cpu"},
        {"model": "cpu", "lm_head": "disk"},
        {"": "disk"},
        {**IN_THE_MIDDLE, "model.layers.1": "disk", "lm_head": "cpu"},
    ],
    ids=str,
)
def test_from_pretrained_takes_a_device_map(tmp_path, device_map):
    expected = logits_of(load(write(tmp_path, shards=3)), IDS)
    if isinstance(device_map, str):
        device_map = accelerate.infer_auto_device_map(made(empty=True))
    model = load(tmp_path, device_map=device_map, offload_folder=tmp_path / "off")
    torch.testing.assert_close(logits_of(model, IDS), expected, rtol=0, atol=0)


def test_a_loaded_model_is_dispatched(tmp_path):
    model = load(write(tmp_path))
    expected = logits_of(model, IDS)
    model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    torch.testing.assert_close(logits_of(model, IDS), expected, rtol=0, atol=0)
