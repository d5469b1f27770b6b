"""The next token of a model in one launch a layer: close to the general way, and as few launches as promised.

Without a GPU, the kernel runs in Triton's interpreter on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from kvshift.models import decoder
from kvshift.models import next_token as models_next_token
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift.models.next_token import Token
from kvshift.models.versions import CACHE
from kvshift.ops.triton import next_token as triton_next_token
from kvshift.ops.triton.call import has_triton

from .llama.tiny import random_tokens, tiny_model
from .registry import MODELS, RETROFITTED
from .test_next_token import TAKE_IT, cache_of, contents, feed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT, LENGTH = 4, 12
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}  # sums have other orders in the two ways


@pytest.fixture(autouse=True)
def launched(monkeypatch) -> list[bool]:
    """Let tokens take the Triton kernel; whether each layer of each token took it."""
    if not has_triton():
        pytest.skip("Triton is not installed")
    taken = []

    def record(self: Token, *args: Any, real: Callable = Token.shift_and_cache) -> Any:
        done = real(self, *args)
        taken.append(done is not None)
        return done

    monkeypatch.setattr(Token, "shift_and_cache", record)
    monkeypatch.setattr(
        models_next_token, "_kernels", lambda x: triton_next_token if x.dtype != torch.float64 else None
    )
    return taken


def without_launches(function: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "prepare_next_token", lambda *_: {})
        return function()


@torch.no_grad()
def decoded(model: Any, kind: str, ids: Tensor) -> list[Tensor]:
    """Return the logits of all tokens, of which the prompt is fed whole, and what the cache holds."""
    cache = cache_of(model, kind)
    prompt = model(ids[:, :PROMPT], **{CACHE: cache}).logits
    return [prompt, feed(model, cache, ids, PROMPT), *contents(cache)]


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", sorted(TAKE_IT))
def test_families_agree_with_the_general_way(name: str, kind: str, launched):
    model, ids = (MODELS | RETROFITTED)[name](torch.float32).to(DEVICE), random_tokens(2, LENGTH).to(DEVICE)
    found = decoded(model, kind, ids)
    assert launched
    assert all(launched)
    expected = without_launches(lambda: decoded(model, kind, ids))
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_dtypes(dtype: torch.dtype, kind: str, launched):
    """Each way may be as far from float64 as one rounding of each operation takes it; the launch rounds less."""
    model, ids = tiny_model(dtype, qk_norm=True).to(DEVICE), random_tokens(3, LENGTH).to(DEVICE)
    found = decoded(model, kind, ids)[1]
    assert all(launched)
    general = without_launches(lambda: decoded(model, kind, ids))[1]
    with torch.no_grad():
        exact = model.double()(ids).logits[:, PROMPT:]
    errors = [(x.double() - exact).square().mean().sqrt() for x in (found, general)]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.interpreted
def test_a_cache_that_grows_is_given_room(launched):
    """Keys and values stay in place for 64 tokens, and are those of a cache that concatenates."""
    model, ids = tiny_model().to(DEVICE), random_tokens(1, PROMPT + 67).to(DEVICE)
    cache = cache_of(model, "dynamic")
    addresses = set()
    with torch.no_grad():
        model(ids[:, :PROMPT], **{CACHE: cache})
        for at in range(PROMPT, ids.shape[1]):
            model(ids[:, at : at + 1], **{CACHE: cache})
            addresses.add(cache.layers[0].keys.data_ptr())
    assert all(launched)
    assert len(addresses) == 2
    expected = without_launches(lambda: decoded(model, "dynamic", ids))[2:]
    for x, y in zip(contents(cache), expected, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@torch.no_grad()
def test_a_static_cache_that_is_full_is_refused_by_name(launched):
    model, ids = tiny_model().to(DEVICE), random_tokens(1, LENGTH + 1).to(DEVICE)
    cache = cache_of(model, "static")
    model(ids[:, : LENGTH - 1], **{CACHE: cache})
    feed(model, cache, ids[:, :LENGTH], LENGTH - 1)
    before = contents(cache)
    with pytest.raises(IndexError, match=f"the cache is full: it has room for {LENGTH} tokens, and holds {LENGTH}"):
        feed(model, cache, ids, LENGTH)
    assert all(torch.equal(x, y) for x, y in zip(contents(cache), before, strict=True))


# What is counted ------------------------------------------------------------------------------------------------------

# Operations that only describe memory, or allocate it.
FREE = {
    "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Count the operations that a GPU computes in a launch, or several."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function._schema.name.split("::")[1]] += 1
        return function(*args, **(kwargs or {}))


class Counted:
    """A kernel that counts its launches and computes nothing."""

    launches = 0
    pre_run_hooks = ()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            self.launches += 1

        return launch


@torch.no_grad()
def launches_of_a_layer(make: Callable[[int], Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the launches of one token in a model of three layers, less those in a model of two."""
    counts = []
    for layers in (2, 3):
        model, token = make(layers).bfloat16().eval(), torch.ones(1, 1, dtype=torch.long)
        config = model.config
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=40)
        kernel = Counted()
        monkeypatch.setattr(triton_next_token, "kernel", lambda kernel=kernel: kernel)
        model(token.expand(1, 5), **{CACHE: cache})
        for _ in range(2):
            model(token, **{CACHE: cache})
        kernel.launches = 0
        with Operations() as operations:
            model(token, **{CACHE: cache})
        counts.append(kernel.launches + sum(n for name, n in operations.counts.items() if name not in FREE))
    return counts[1] - counts[0]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="operations of a CPU are counted")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_launches_of_a_layer(kind: str, monkeypatch):
    """Projections, MLP, residuals and the two norms are 27, attention is one, and all else of a layer another one."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 8}

    def ours(layers: int, **options: Any) -> Any:
        return KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**sizes, num_hidden_layers=layers, **options))

    def theirs(layers: int) -> Any:
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers))

    transformers = launches_of_a_layer(theirs, kind, monkeypatch)
    assert launches_of_a_layer(ours, kind, monkeypatch) == 29
    assert launches_of_a_layer(lambda layers: ours(layers, qk_norm=True), kind, monkeypatch) == 29
    assert without_launches(lambda: launches_of_a_layer(ours, kind, monkeypatch)) > 29
    assert transformers > 29


@pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no CUDA device")
@torch.no_grad()
def test_a_cuda_graph_decodes(launched):
    """A graph that is captured once counts its tokens itself."""
    model, ids = tiny_model(qk_norm=True).to(DEVICE), random_tokens(2, LENGTH).to(DEVICE)
    expected = without_launches(lambda: decoded(model, "static", ids))
    cache = cache_of(model, "static")
    model(ids[:, :PROMPT], **{CACHE: cache})
    token, positions = ids[:, PROMPT : PROMPT + 1].clone(), torch.tensor([[PROMPT]], device=DEVICE)
    logits = []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        logits.append(model(token, position_ids=positions, **{CACHE: cache}).logits.clone())  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(token, position_ids=positions, **{CACHE: cache}).logits
    for at in range(PROMPT + 1, LENGTH):
        token.copy_(ids[:, at : at + 1])
        positions.fill_(at)
        graph.replay()
        logits.append(output.clone())
    torch.testing.assert_close(torch.cat(logits, 1), expected[1], **CLOSE)
    assert all(launched)
