"""Shift, QK-norm and rotation in one launch, in decoding too: the model gives the results of separate operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from kvshift.models.versions import CACHE
from kvshift.ops import attention_inputs, dispatch
from kvshift.ops.triton.call import triton_unsupported_reason

from .checks import ATOL, assert_greedy, logits_of, new_tokens_of
from .tiny import left_padded, random_tokens, tiny_model

pytestmark = pytest.mark.interpreted

LAYERS = 2
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "norm": {"qk_norm": True},
    "norm, window 3": {"qk_norm": True, "shift_window": 3},
    "keys": {"shift_targets": ["k"]},
}
LONG = pytest.mark.slow
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
with_and_without_norm = pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=["raw", "normed"])


@pytest.fixture(autouse=True)
def kernels_that_run(monkeypatch) -> None:
    refusal = triton_unsupported_reason(torch.empty(0), 2)
    if refusal is not None:
        pytest.skip(refusal)
    monkeypatch.setattr(dispatch, "_AUTO", "triton")


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """A list whose only number counts the launches that both shift and rotate."""
    counted = [0]

    def counting(*args: Any, real: Any = attention_inputs.shift_triton, **options: Any) -> Any:
        counted[0] += 1
        return real(*args, **options)

    monkeypatch.setattr(attention_inputs, "shift_triton", counting)
    return counted


def batches() -> dict[str, dict[str, Tensor]]:
    ids, mask = left_padded([random_tokens(length, seed=length) for length in (7, 4)])
    documents = torch.tensor([[0] * 3 + [1] * 4, [3] * 5 + [1] * 2])
    positions = torch.cat([torch.arange(3), torch.arange(4)]).unsqueeze(0)
    bounds = torch.tensor([0, 4, 7], dtype=torch.int32)
    return {
        "plain": {"input_ids": random_tokens(2, 7)},
        "left padding": {"input_ids": ids, "attention_mask": mask},
        "documents": {"input_ids": random_tokens(2, 7), "seq_idx": documents},
        "positions": {"input_ids": random_tokens(1, 7), "position_ids": positions},
        "pack": {"input_ids": random_tokens(1, 7), "cu_seq_lens_q": bounds},
    }


def assert_close(results: list[Tensor], expected: list[Tensor], options: dict[str, Any]) -> None:
    """Compare results; the norms of Llama are in float32 even in a float64 model, but those of the launch are not."""
    atol = ATOL if options.get("qk_norm") else 1e-12
    for x, y in zip(results, expected, strict=True):
        rtol = 2.0**-23 if x.dtype == torch.float32 else 0.0  # gradients of the coefficients
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


def loss_and_gradients(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    labels = batch["input_ids"].masked_fill(batch.get("attention_mask", torch.ones(())) == 0, -100)
    loss = model(**batch, labels=labels, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    "batch", [name if name in ("plain", "pack") else pytest.param(name, marks=LONG) for name in batches()]
)
@every_variant
def test_loss_and_gradients(options: dict, batch: str, launches, monkeypatch):
    model, inputs = tiny_model(torch.float64, **options).train(), batches()[batch]
    own = loss_and_gradients(model, inputs)
    assert launches == [LAYERS]
    monkeypatch.setattr(dispatch, "_AUTO", "eager")
    assert_close(own, loss_and_gradients(model, inputs), options)
    assert launches[0] == LAYERS


@with_and_without_norm
def test_smaller_dtypes_err_no_more(options: dict, monkeypatch):
    """The error of bf16 logits against fp64, summed over four models, is no larger than without the launch."""
    errors = {"triton": 0.0, "eager": 0.0}
    for seed in range(4):
        model, ids = tiny_model(torch.bfloat16, seed=seed, **options), random_tokens(1, 23)
        exact = tiny_model(torch.float64, **options)
        exact.load_state_dict(model.state_dict())
        expected = logits_of(exact, ids)
        for backend in errors:
            monkeypatch.setattr(dispatch, "_AUTO", backend)
            errors[backend] += float((logits_of(model, ids).double() - expected).square().mean())
    assert errors["triton"] <= errors["eager"]


@LONG
@pytest.mark.parametrize("options", [{"qk_norm": True}, {}], ids=["normed", "raw"])
def test_generation_takes_one_launch_for_each_token(options: dict, launches, monkeypatch):
    model = tiny_model(torch.float64, **options)
    rows = random_tokens(2, 5)
    five: dict[str, Any] = {"max_new_tokens": 5}
    static = new_tokens_of(model, rows, cache_implementation="static", **five)
    assert launches == [5 * LAYERS]
    dynamic = new_tokens_of(model, rows, **five)
    assert launches == [10 * LAYERS]
    monkeypatch.setattr(dispatch, "_AUTO", "eager")
    eager = new_tokens_of(model, rows, cache_implementation="static", **five)
    assert torch.equal(static, eager)
    assert torch.equal(dynamic, eager)
    assert_greedy(model, list(rows), eager)


@LONG
@pytest.mark.parametrize("options", [VARIANTS[name] for name in ("keys", "norm, window 3")], ids=str)
def test_logits_and_states_token_by_token(options: dict, launches, monkeypatch):
    """Compares the logits and the contents of the cache, not only the tokens."""
    model, row = tiny_model(torch.float64, **options), random_tokens(2, 6)
    results = []
    for backend in ("triton", "eager"):
        monkeypatch.setattr(dispatch, "_AUTO", backend)
        cache: Any = StaticCache(config=model.config, max_cache_len=9)
        logits = [logits_of(model, piece, **{CACHE: cache}) for piece in row.split((2, 1, 1, 2), dim=1)]
        layer = cache.layers[1]
        state = layer.shift_state
        results.append([*logits, layer.keys, layer.values, state.k, state.v, layer.cumulative_length])
    assert launches == [4 * LAYERS]
    assert_close(results[0], results[1], options)
