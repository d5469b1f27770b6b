"""Static caches, and compiled decoding with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CompileConfig, LlamaConfig, PreTrainedModel, StaticCache

from kvshift.models.versions import CACHE

from ..registry import MODELS
from .checks import assert_greedy, assert_next, check_right_padding, every_variant, logits_of, new_tokens_of
from .tiny import left_padded, random_tokens, tiny_model


def test_right_padding():
    model = tiny_model(torch.float64, shift_window=3)
    check_right_padding(model, StaticCache(config=model.config, max_cache_len=32))


@every_variant
def test_reset_and_reuse_keep_the_tensors_in_place(options: dict):
    model = tiny_model(torch.float64, **options)
    cache = StaticCache(config=model.config, max_cache_len=32)
    addresses = set()
    for seed in range(3):
        row = random_tokens(1, 9, seed=seed)
        logits_of(model, row, **{CACHE: cache})
        assert_next(model, row, cache, random_tokens(1, 1, seed=9))
        if model.config.shift_targets:
            addresses |= {cache.layers[0].shift_state.k.data_ptr(), cache.layers[0].shift_state.v.data_ptr()}
        cache.reset()
    assert len(addresses) in (0, 2)


def test_a_static_cache_for_stock_llama_is_taken_too():
    model, row = tiny_model(torch.float64), random_tokens(1, 9)
    llama = LlamaConfig(num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, hidden_size=42, head_dim=10)
    cache = StaticCache(config=llama, max_cache_len=32)
    logits_of(model, row, **{CACHE: cache})
    assert_next(model, row, cache, random_tokens(1, 1, seed=9))


def graphs_of_compiled_decoding(
    build: Callable[..., PreTrainedModel] = tiny_model, prefill_chunk_size: int | None = None, **options: Any
) -> int:
    """Generate twice, check the tokens, and return the number of graphs of compiled decoding; graph breaks fail."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(torch.float64, **options)
    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True  # otherwise generate compiles on accelerators only
    inputs = {"cache_implementation": "static", "compile_config": compile_config, "max_new_tokens": 6}
    inputs["prefill_chunk_size"] = prefill_chunk_size
    for seed in range(2):
        rows = [random_tokens(length, seed=seed) for length in (7, 9)]
        assert_greedy(model, rows, new_tokens_of(model, *left_padded(rows), **inputs))
    assert not torch._dynamo.utils.counters["graph_break"]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"shift_window": 4, "shift_targets": ["q", "k", "v"]}], ids=["paper", "window 4"]
)
def test_generate_compiles_all_steps_of_all_calls_into_one_graph(options: dict):
    assert graphs_of_compiled_decoding(**options) == 1


@pytest.mark.slow
def test_baichuan_compiles_without_a_break():
    assert graphs_of_compiled_decoding(MODELS["Baichuan-M1"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sliding_window": 12}, {"prefill_chunk_size": 4}], ids=str)
def test_it_compiles_as_often_as_without_shift(options: dict):
    """Transformers counts a window's tokens in a Python integer: one graph for each value, until it becomes dynamic.

    Chunked prefill and the first write into the cache are compiled, too.
    """
    assert graphs_of_compiled_decoding(**options) == graphs_of_compiled_decoding(**options, shift_targets=[])


@pytest.mark.slow
def test_the_default_compiler_gives_the_same_tokens():
    torch._dynamo.reset()
    model, row = tiny_model(torch.float64), random_tokens(1, 8)
    step = torch.compile(model.forward, fullgraph=True, dynamic=False)
    cache = StaticCache(config=model.config, max_cache_len=32)
    token = logits_of(model, row, **{CACHE: cache})[:, -1:].argmax(-1)
    generated = [token]
    for _ in range(5):
        with torch.no_grad():
            token = step(token, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        generated.append(token)
    assert_greedy(model, row, torch.cat(generated, dim=1))
