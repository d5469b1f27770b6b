"""Weights under the names of the paper's appendix M, in a tiny model that is compared with the formulas."""

from __future__ import annotations

import pytest
import torch

from kvshift.models.baichuan_m1 import from_paper
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM, size_config

from ..llama.checks import ATOL, logits_of
from ..llama.tiny import random_tokens
from . import reference
from .tiny import checkpoint, config_with

SIZES = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 29, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
CONFIG = KVShiftLlamaConfig(**SIZES, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
PLAIN = config_with(sliding_window_layers=[], sliding_window=None)


def published():
    """Return weights as in appendix M: one kernel (G, 2) for each layer, with the previous token first."""
    weights = {}
    for name, tensor in checkpoint(PLAIN).items():
        last = {"conv_k": "K", "conv_v": "V"}.get(name.rpartition(".")[2])
        if last:
            weights[f"{name.rpartition('.')[0]}.{last}"] = tensor.reshape(2, 2)
        else:
            weights[name] = tensor
    return weights


@pytest.mark.parametrize("norm_head", [True, False])
def test_logits(norm_head):
    model = KVShiftLlamaForCausalLM(CONFIG).double().eval()
    weights = published()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    model.load_state_dict(from_paper(weights, CONFIG, norm_head=norm_head))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.items())
    ids = random_tokens(1, 13)
    expected = reference.logits(
        {name: tensor.double() for name, tensor in checkpoint(PLAIN).items()}, PLAIN, ids[0].tolist()
    )
    if not norm_head:  # undo the norm that the formulas have
        expected = expected * (weights["lm_head.weight"].double().norm(dim=1) + 1e-7)
    torch.testing.assert_close(logits_of(model, ids)[0], expected, rtol=0, atol=ATOL)


def test_the_shapes_are_those_of_the_table():
    with torch.device("meta"):
        names = KVShiftLlamaForCausalLM(size_config("2.9B")).state_dict()
        packed = {name: tensor for name, tensor in names.items() if "_proj.weight" not in name or "mlp" in name}
        for layer in range(32):
            start = f"model.layers.{layer}.self_attn."
            packed[f"{start}W_pack.weight"] = torch.empty((20 + 2 * 4) * 128, 2560)
            packed[f"{start}o_proj.weight"] = torch.empty(2560, 2560)
            for ours, theirs in (("alpha", "K"), ("beta", "V")):
                del packed[f"{start}shift.{ours}"]
                packed[f"{start}{theirs}"] = torch.empty(4, 2)
        found = from_paper(packed, size_config("2.9B"), norm_head=True)
    assert {name: tensor.shape for name, tensor in found.items()} == {n: tensor.shape for n, tensor in names.items()}


CASES = {
    "missing": (lambda w: w.pop("model.layers.1.self_attn.K"), 'Missing .* "model.layers.1.self_attn.shift.alpha"'),
    "unknown": (lambda w: w.update({"model.more": torch.ones(2)}), 'Unexpected .* "model.more"'),
    "window 3": (
        lambda w: w.update({"model.layers.0.self_attn.V": torch.ones(2, 3)}),
        r"size mismatch for model.layers.0.self_attn.shift.beta: .* torch.Size\(\[2, 3\]\)",
    ),
    "rows": (
        lambda w: w.update({"model.layers.0.self_attn.W_pack.weight": torch.ones(90, 48)}),
        '(?s)Missing .*layers.0.self_attn.k_proj.weight.*Unexpected .* "model.layers.0.self_attn.W_pack.weight"',
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_other_weights_are_refused_by_name(case):
    change, message = CASES[case]
    weights = published()
    change(weights)
    with pytest.raises(RuntimeError, match=message):
        KVShiftLlamaForCausalLM(CONFIG).load_state_dict(from_paper(weights, CONFIG, norm_head=True))
