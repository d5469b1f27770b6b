"""Training keeps, for each token, what it keeps without a shift, and its gradients keep every bit."""

import pytest
import torch

from kvshift.layers import recompute
from kvshift.ops import attention_inputs
from tests.layers.kept import bytes_kept

from ...covering import covering
from ..llama.tiny import left_padded, random_tokens
from .tiny import shifted_gpt2, tiny_gpt2


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    monkeypatch.setattr(recompute, "_WORTH_RECOMPUTING", {"cpu": 0})


@covering(
    dropout={"": False, "dropout": True}, padded={"": False, "padded": True}, attention=["sdpa", "eager", "upcast"]
)
def test_gradients_keep_every_bit(dropout, padded, attention, monkeypatch):
    model = shifted_gpt2(attention="sdpa" if attention == "sdpa" else "eager").train(dropout)
    for module in model.modules():
        if hasattr(module, "reorder_and_upcast_attn"):
            module.reorder_and_upcast_attn = attention == "upcast"
    ids, mask = left_padded([random_tokens(length, seed=length) for length in (11, 4 if padded else 11)])

    def gradients():
        model.zero_grad()
        torch.manual_seed(0)  # of dropout
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    calls, operator = [], attention_inputs.shift_keys_values
    monkeypatch.setattr(
        attention_inputs, "shift_keys_values", lambda *args, **options: calls.append(None) or operator(*args, **options)
    )
    actual = gradients()
    # Two layers. On a CPU matmul, with dropout that of the fused attention too, copies what lies across its batches.
    assert len(calls) == 2 * 2 or dropout or attention != "sdpa"
    monkeypatch.setattr(recompute, "may_recompute", lambda *modules: False)
    assert all(torch.equal(a, e) for a, e in zip(actual, gradients(), strict=True))


def test_a_token_keeps_what_it_keeps_without_a_shift():
    model, stock = shifted_gpt2(), tiny_gpt2()

    def kept(model, length):
        ids = random_tokens(2, length)
        return bytes_kept(lambda: model(input_ids=ids, use_cache=False).logits, ids, *model.parameters())

    more = {length: kept(model, length) - kept(stock, length) for length in (11, 44)}
    assert more[11] == more[44]
