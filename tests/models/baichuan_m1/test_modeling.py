"""Logits and gradients of a loaded checkpoint, compared with the formulas on the tensors of its file."""

from __future__ import annotations

import pytest
import torch

from ..llama.checks import ATOL
from ..llama.tiny import random_tokens
from . import reference
from .tiny import CONFIG, checkpoint, config_with, load, write

CONFIGS = {
    "one sliding layer": CONFIG,
    "sliding layers first": config_with(sliding_window_layers=[0, 1]),
    "all sliding": config_with(sliding_window_layers=[2, 0, 1], sliding_window=2),
    "none sliding": config_with(sliding_window_layers=[], sliding_window=None),
    "the same heads": config_with(num_swa_attention_heads=None, num_swa_key_value_heads=None),
    "one KV head": config_with(num_key_value_heads=1, num_swa_key_value_heads=6),
    "tied": config_with(tie_word_embeddings=True),
}


def in_float64(weights):
    return {name: weight.double() for name, weight in weights.items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits(tmp_path, name, attention):
    config = CONFIGS[name]
    weights = checkpoint(config)
    model = load(write(tmp_path, weights, config), attn_implementation=attention)
    ids = random_tokens(2, 17)
    with torch.no_grad():
        found = model(ids).logits
    for tokens, got in zip(ids.tolist(), found, strict=True):
        expected = reference.logits(in_float64(weights), config, tokens)
        assert expected.std() > 0.5
        torch.testing.assert_close(got, expected, rtol=0, atol=ATOL)


def test_gradients_of_every_weight(tmp_path):
    model = load(write(tmp_path))
    weights = {name: weight.requires_grad_() for name, weight in in_float64(checkpoint()).items()}
    ids, targets = random_tokens(1, 11), random_tokens(11, seed=1)
    loss = torch.nn.functional.cross_entropy
    loss(model(ids).logits[0], targets).backward()
    loss(reference.logits(weights, CONFIG, ids[0].tolist()), targets).backward()
    compared = 0
    for name, parameter in model.named_parameters():
        if name.endswith(("alpha", "beta")):
            theirs = name.replace("shift.alpha", "conv_k").replace("shift.beta", "conv_v")
            got = parameter.grad.flip(1).reshape(1, 1, -1, 1, 2).double()
        else:
            theirs, got = name, parameter.grad
        theirs = theirs.replace("lm_head.raw", "lm_head.weight")
        assert weights[theirs].grad.abs().max() > 1e-4
        torch.testing.assert_close(got, weights[theirs].grad, rtol=0, atol=ATOL)
        compared += 1
    assert compared == len(weights)


def test_bfloat16(tmp_path):
    """The error against the formulas in float64 is about that of the formulas in bfloat16, on the same weights."""
    weights = checkpoint(dtype=torch.bfloat16)
    model = load(write(tmp_path, weights, config_with(torch_dtype="bfloat16")), dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.shift.alpha.dtype == torch.float32
    ids = random_tokens(1, 17)
    with torch.no_grad():
        found = model(ids).logits[0]
    assert found.dtype == torch.bfloat16
    expected = reference.logits(in_float64(weights), CONFIG, ids[0].tolist())
    rounded = reference.logits(weights, CONFIG, ids[0].tolist())
    assert rounded.dtype == torch.bfloat16
    assert (found - expected).abs().mean() < 1.25 * (rounded - expected).abs().mean() < 0.1


def test_a_row_of_zeros_in_the_head_gives_zeros(tmp_path):
    weights = checkpoint()
    weights["lm_head.weight"][3] = 0  # 0 / 1e-7
    model = load(write(tmp_path, weights), dtype=torch.float32)
    assert (model(random_tokens(1, 5)).logits[..., 3] == 0).all()


def test_all_layers_record_hidden_states_and_attentions(tmp_path):
    model = load(write(tmp_path), attn_implementation="eager")
    output = model(random_tokens(1, 9), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 4
    assert [attention.shape[1] for attention in output.attentions] == [4, 6, 4]
