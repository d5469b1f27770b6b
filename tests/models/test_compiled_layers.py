"""Decoder layers that are compiled one by one (`layer.compile()`) share as many graphs as those of the stock model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional

from kvshift.models.versions import CACHE

from .llama.tiny import random_tokens
from .registry import baichuan
from .retrofit.tiny_families import FAMILIES, shifted, stock

# torch's compiler itself asks for gradients of the inputs of a layer, and makes an instance of an autograd function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

IDS = random_tokens(2, 9)
PADDED = torch.ones_like(IDS).index_fill(1, torch.arange(3), 0)
RESTARTING = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])


def _train(model: Any, **where: Any) -> None:
    logits = model.train()(IDS[: len(where.get("position_ids", IDS))], use_cache=False, **where).logits
    functional.mse_loss(logits, torch.zeros_like(logits)).backward()


def _train_twice_with_padding(model: Any) -> None:
    for _ in range(2):
        _train(model, attention_mask=PADDED.clone())


@torch.no_grad()
def _decode(model: Any) -> None:
    cache = model.eval()(IDS, use_cache=True)[CACHE]
    for token in (IDS[:, :1], IDS[:, 1:2]):
        model(token, **{CACHE: cache})


CALLS: dict[str, Callable[[Any], Any]] = {
    "training": _train,
    "training with padding": _train_twice_with_padding,
    "training with documents": lambda model: _train(model, position_ids=RESTARTING),
    "evaluation": torch.no_grad()(lambda model: model.eval()(IDS, use_cache=False)),
    "decoding": _decode,
}


def graphs(model: Any, call: Callable[[Any], Any]) -> int:
    """Return how many graphs the layers of `model` are compiled to in a call."""
    torch._dynamo.reset()
    counters.clear()
    decoder = model.base_model
    for layer in decoder.h if hasattr(decoder, "h") else decoder.layers:
        layer.compile(backend="eager", dynamic=True)
    with torch._dynamo.config.patch(recompile_limit=64):
        call(model)
    return counters["stats"]["unique_graphs"]


def require_as_many_as_stock(family: str, call: str) -> None:
    sizes: dict[str, Any] = {"n_layer" if family == "GPT-2" else "num_hidden_layers": 3}
    if family == "Gemma 3":
        sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    counted = graphs(shifted(family, torch.float32, **sizes), CALLS[call])
    assert counted == graphs(stock(family, torch.float32, **sizes), CALLS[call]) > 0


def test_training():
    require_as_many_as_stock("Llama", "training")


@pytest.mark.slow
@pytest.mark.parametrize("call", [call for call in CALLS if call != "training"])
def test_other_calls(call):
    require_as_many_as_stock("Llama", call)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("Llama", "Qwen2, sliding window")])
def test_other_families(family):
    require_as_many_as_stock(family, "training with padding")


@pytest.mark.slow
@pytest.mark.parametrize("call", ["training", "training with padding"])
def test_baichuan_has_one_graph_for_each_kind_of_layer(call):
    """The two kinds differ in their numbers of heads."""
    model = baichuan(num_hidden_layers=4, sliding_window_layers=[1, 3])
    assert graphs(model, CALLS[call]) == 2
