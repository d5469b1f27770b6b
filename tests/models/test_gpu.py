"""Attention and the Llama model on a CUDA device give the CPU's results, through the Triton kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvshift.ops import attention_inputs, dispatch
from kvshift.ops.triton import launch as triton_launch
from tests.layers.attention_cases import GQA, make, tokens
from tests.models.llama.tiny import left_padded, random_tokens, tiny_model
from tests.ops.device import DEVICE, MARKS, needs_cuda

pytestmark = MARKS

# Sums over 37 to 61 products have a different order, in float32; gradients pass through twice as many.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(autouse=True)
def through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the Triton kernels, the default on a CUDA device, and nondeterministic algorithms, as models usually do."""
    torch.use_deterministic_algorithms(False)
    if DEVICE.type != "cuda":
        monkeypatch.setattr(dispatch, "_AUTO", "triton")
    yield
    torch.use_deterministic_algorithms(True)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list whose only number counts the calls that fuse shift and rotation into one launch."""
    counted = [0]

    def path(*args: Any, real: Callable = attention_inputs.fused_path) -> str:
        taken = real(*args)
        counted[0] += taken == "launch"
        return taken

    monkeypatch.setattr(attention_inputs, "fused_path", path)
    return counted


def eagerly(call: Callable) -> Any:
    """Return the result of a call by PyTorch's operations, without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_AUTO", "eager")
        return call()


def to_device(x: Any) -> Any:
    return x.to(DEVICE) if isinstance(x, Tensor) else x


CALLS: dict[str, dict[str, Any]] = {
    "rows": {},
    "padding": {"mask": torch.tensor([[False, True, True, False, True, True, True], [True] * 5 + [False] * 2])},
    "pack": {"cu_seqlens": torch.tensor([0, 3, 3, 4, 14], dtype=torch.int32)},
    "documents": {"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3] * 7])},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": True, "shift_window": 3, "sliding_window": 4},
        {"shift_targets": ("k",)},
        {"shift_targets": ("v",), "qk_norm": True},
        {"shift_targets": ("q", "k", "v")},
        {"shift_targets": ()},
    ],
    ids=["", "options", "keys", "values", "queries", "none"],
)
def test_attention(options, call, launches):
    here = make(GQA, dtype=torch.float32, **options)
    there = deepcopy(here).to(DEVICE)
    x = tokens(1, 14, dtype=torch.float32) if "cu_seqlens" in call else tokens(2, 7, dtype=torch.float32)
    weights = tokens(*x.shape[:2], seed=1, dtype=torch.float32)

    def train(layer: nn.Module, x: Tensor, weights: Tensor, call: dict[str, Any]) -> list[Tensor]:
        x = x.detach().requires_grad_()
        out, _ = layer(x, **call)
        return [out, *torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()])]

    expected = eagerly(lambda: train(here, x, weights, call))
    moved = {name: to_device(value) for name, value in call.items()}
    results = train(there, x.to(DEVICE), weights.to(DEVICE), moved)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), other, **CLOSE)


def test_attention_decodes(launches):
    here = make(GQA, dtype=torch.float32, qk_norm=True)
    there = deepcopy(here).to(DEVICE)
    x = tokens(2, 7, dtype=torch.float32)
    with torch.no_grad():
        expected, _ = eagerly(lambda: here(x))
        out, state = there(x[:, :4].to(DEVICE))
        pieces = [out]
        for t in range(4, 7):
            out, state = there(x[:, t : t + 1].to(DEVICE), state=state)
            pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1).cpu(), expected, **CLOSE)
    assert launches[0] == (1 if DEVICE.type == "cuda" else 4)  # "auto" has plain operations for the next token


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_a_model_trains(padded, launches):
    here: Any = tiny_model()
    there = deepcopy(here).to(DEVICE)
    rows = [random_tokens(length, seed=length) for length in ((3, 11) if padded else (11, 11))]
    ids, mask = left_padded(rows)

    def train(model: nn.Module, ids: Tensor, mask: Tensor) -> list[Tensor]:
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(ids, attention_mask=mask if padded else None, labels=labels, use_cache=False).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = eagerly(lambda: train(here, ids, mask))
    for result, other in zip(train(there, ids.to(DEVICE), mask.to(DEVICE)), expected, strict=True):
        torch.testing.assert_close(result.cpu(), other, **CLOSE)
    assert launches[0] == 2, "a launch for each layer"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", pytest.param("reduce-overhead", marks=needs_cuda)])
def test_a_compiled_model_trains(mode, monkeypatch):
    """Under torch.compile, "auto" runs the kernels for keys and values, and again in backward to recompute them.

    The model has as many KV heads as query heads and a head size that attention's kernels support; otherwise attention
    would keep copies.
    """
    here: Any = tiny_model(num_key_value_heads=6, head_dim=16)
    there = deepcopy(here).to(DEVICE)
    compiled = torch.compile(there, mode=mode, fullgraph=True)
    real, forwards = triton_launch.kernels(), itertools.count()
    monkeypatch.setattr(triton_launch, "kernels", lambda: counting_forwards(real, forwards))
    for seed in (1, 2):  # the second uses the compiled code
        ids = torch.stack([random_tokens(11, seed=10 * seed + i) for i in range(2)])

        def train(call: Any, model: nn.Module, ids: Tensor) -> list[Tensor]:
            loss = call(input_ids=ids, labels=ids, use_cache=False).loss
            return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

        expected = eagerly(lambda ids=ids, train=train: train(here, here, ids))
        for result, other in zip(train(compiled, there, ids.to(DEVICE)), expected, strict=True):
            torch.testing.assert_close(result.cpu(), other, **CLOSE)
    assert next(forwards) >= 2 * 2 * 2, "in both steps and layers forward, and again in backward"


def counting_forwards(kernels: SimpleNamespace, forwards: Iterator[int]) -> SimpleNamespace:
    class Forward:
        def __getitem__(self, grid: Any) -> Callable[..., object]:
            next(forwards)
            return kernels.forward[grid]

    return SimpleNamespace(**{**vars(kernels), "forward": Forward()})


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_model_generates(cache):
    """Greedy generation gives the tokens of the model on the CPU."""
    here: Any = tiny_model()
    there = deepcopy(here).to(DEVICE)
    ids = random_tokens(2, 5)
    options = {"do_sample": False, "max_new_tokens": 6}
    expected = eagerly(lambda: here.generate(ids, attention_mask=torch.ones_like(ids), **options))
    given = ids.to(DEVICE)
    generated = there.generate(
        given, attention_mask=torch.ones_like(given), cache_implementation=cache, disable_compile=True, **options
    )
    assert generated.tolist() == expected.tolist()


@needs_cuda
@pytest.mark.slow
def test_a_model_generates_through_a_compiler_and_cuda_graphs():
    """This is the default of transformers with a static cache."""
    here: Any = tiny_model()
    there = deepcopy(here).to(DEVICE)
    ids = random_tokens(2, 5)
    options = {"do_sample": False, "max_new_tokens": 6}
    expected = eagerly(lambda: here.generate(ids, attention_mask=torch.ones_like(ids), **options))
    given = ids.to(DEVICE)
    for _ in range(2):
        generated = there.generate(
            given, attention_mask=torch.ones_like(given), cache_implementation="static", **options
        )
        assert generated.tolist() == expected.tolist()
