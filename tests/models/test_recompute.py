"""Training saves as much per token as without a shift, and its gradients have the same bits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvshift.layers import recompute
from kvshift.ops import attention_inputs, boundaries
from tests.covering import covering
from tests.layers.kept import bytes_kept

from .llama.tiny import left_padded, random_tokens, tiny_model
from .retrofit.tiny_families import shifted_gpt2, stock

MHA = {"num_key_value_heads": 6}
LLAMA: dict[str, dict[str, Any]] = {
    "mha": MHA,
    "gqa": {},
    "gqa-norm": {"qk_norm": True},
    "mha-norm-lags": {**MHA, "qk_norm": True, "shift_window": 3},
    "gqa-window-gate": {"sliding_window": 4, "shift_constraint": "gate"},
}


def upcast(dtype: torch.dtype, attention: str) -> PreTrainedModel:
    model = shifted_gpt2(dtype, attention="eager")
    for block in model.transformer.h:
        block.attn.reorder_and_upcast_attn = True
    return model


BUILD: dict[str, Callable[..., PreTrainedModel]] = {
    **{name: partial(tiny_model, **options) for name, options in LLAMA.items()},
    "gpt2": shifted_gpt2,
    "gpt2-dropout": lambda dtype, attention: shifted_gpt2(dtype, attention=attention).train(),
    "gpt2-upcast": upcast,
}


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    monkeypatch.setattr(recompute, "_MIN_ELEMENTS", {"cpu": 0})


def batches():
    ids, mask = left_padded([random_tokens(length, seed=length) for length in (11, 4)])
    documents = torch.tensor([[0] * 5 + [1] * 6, [3] * 8 + [1] * 3])
    packed = {"input_ids": random_tokens(1, 11), "cu_seq_lens_q": torch.tensor([0, 4, 11], dtype=torch.int32)}
    return {
        "plain": {"input_ids": random_tokens(2, 11)},
        "padded": {"input_ids": ids, "attention_mask": mask},
        "documents": {"input_ids": random_tokens(2, 11), "seq_idx": documents},
        "packed": packed,
    }


def gradients(model, inputs):
    model.zero_grad()
    torch.manual_seed(0)  # for dropout
    model(**inputs, use_cache=False).logits.square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@covering(
    name=list(BUILD),
    dtype=[torch.float32, torch.bfloat16],
    attention=["sdpa", "eager"],
    batch=["plain", "padded", "documents", "packed"],
)
def test_gradients_keep_every_bit(name, dtype, attention, batch, keep_all, monkeypatch):
    model, inputs = BUILD[name](dtype=dtype, attention=attention), batches()[batch]
    expected = keep_all(gradients, model, inputs)
    calls, operator = [], attention_inputs.shift_keys_values
    monkeypatch.setattr(
        attention_inputs, "shift_keys_values", lambda *args, **options: calls.append(None) or operator(*args, **options)
    )
    actual = gradients(model, inputs)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    # There are two layers. On a CPU, matmul copies operands that are strided across its batches, also that of sdpa with
    # dropout.
    assert len(calls) == 2 * 2 or attention == "eager" or name in ("gpt2-dropout", "gpt2-upcast")


VANILLA = {name: partial(tiny_model, **LLAMA[name], shift_targets=()) for name in ("mha", "gqa", "gqa-norm")}


@covering(
    name=["mha", "gqa", "gqa-norm", "gpt2"],
    dtype=[torch.float32, torch.bfloat16],
    autocast={"": False, "autocast": True},
)
def test_a_token_keeps_what_it_keeps_without_a_shift(name, dtype, autocast):
    model, vanilla = BUILD[name](dtype=dtype), (VANILLA | {"gpt2": partial(stock, "GPT-2")})[name](dtype=dtype)

    def kept(model, length):
        ids = random_tokens(2, length)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            return bytes_kept(lambda: model(input_ids=ids, use_cache=False).logits, ids, *model.parameters())

    more = {length: kept(model, length) - kept(vanilla, length) for length in (11, 44)}
    assert more[11] == more[44]


@pytest.mark.parametrize("batch", ["padded", "documents", "packed"])
def test_one_plan_serves_all_layers_and_their_recomputation(batch, monkeypatch):
    made, real = [], boundaries.ShiftPlan
    monkeypatch.setattr(boundaries, "ShiftPlan", lambda *parts: made.append(real(*parts)) or made[-1])
    model = tiny_model().train()
    for calls in (1, 2):
        gradients(model, batches()[batch])
        assert len(made) == calls
    with torch.no_grad():
        model(**batches()[batch], use_cache=False)
    assert [plan.readers is not None for plan in made] == [True, True, False]  # only calls with gradients need readers


def test_a_plan_is_shared_by_the_same_tensors_alone():
    mask = torch.tensor([[True, False, True]])

    def plan(mask, window=2):
        return boundaries.plan_shift(1, 3, window, window - 1, mask.device, mask=mask)

    assert plan(mask) is not plan(mask)
    with boundaries.shared_plans():
        first = plan(mask)
        assert plan(mask) is first
        assert plan(mask, window=3).sources.shape == (1, 3, 3)
        assert plan(torch.ones_like(mask)).sources.tolist() != first.sources.tolist()
        with boundaries.shared_plans():
            assert plan(mask) is not first
        assert plan(mask) is first
    assert plan(mask) is not first
