"""Detection of sequence parallelism in one process; `tests/models/test_sharded_sequences.py` uses two."""

import sys

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch.distributed.tensor.experimental import context_parallel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvshift.layers.sequence_sharding import refuse_sharded_sequence, sequence_parallelism
from tests.layers.attention_cases import GQA, B, T, make, tokens


@pytest.fixture
def two(alone, monkeypatch):
    """A process group of size 1 that reports a size of 2."""
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    yield alone
    monkeypatch.undo()


def test_nothing_is_refused_where_nothing_is_cut(two):
    assert sequence_parallelism() is None
    refuse_sharded_sequence()


@pytest.mark.parametrize("initialized", [False, True])
def test_one_process_cuts_nothing(initialized, monkeypatch, request):
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(cp_size=2))
    if initialized:
        request.getfixturevalue("alone")
    assert sequence_parallelism() is None


def test_context_parallel_of_torch(two):
    layer, x = make(GQA), tokens(B, 4)
    layer(x)
    with (
        context_parallel(two, buffers=[x.clone()], buffer_seq_dims=[1]),
        pytest.raises(ValueError, match=r"KV shift is not supported with context parallelism \(torch\."),
    ):
        layer(x)
    layer(x)  # the context has left no trace


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"cp_size": 2}, "context parallelism (accelerate's ParallelismConfig, cp_size=2)"),
        ({"sp_size": 4}, "Ulysses sequence parallelism (accelerate's ParallelismConfig, sp_size=4)"),
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2}, None),
    ],
)
def test_parallelism_config(two, monkeypatch, config: dict, name: str | None):
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(**config))
    assert sequence_parallelism() == name


@pytest.mark.parametrize(
    "module", ["deepspeed.runtime.sequence_parallel.ulysses_sp", "ring_flash_attn.adapters.hf_adapter"]
)
def test_attention_of_others(two, monkeypatch, module: str):
    def attention(*args, **kwargs):
        raise AssertionError("attention was reached")

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", attention)
    assert sequence_parallelism() is None
    attention.__module__ = module
    assert sequence_parallelism() == f"sequence parallelism (attention by {module})"


def test_neither_accelerate_nor_transformers_is_needed(two, monkeypatch):
    for name in ("accelerate.state", "transformers.modeling_utils"):
        monkeypatch.delitem(sys.modules, name)
    assert sequence_parallelism() is None


def test_the_layer_refuses(two, monkeypatch):
    layer, x = make(GQA), tokens(B, T)
    plain = make(GQA, shift_targets=())
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(cp_size=2))
    with pytest.raises(ValueError, match=r"KV shift is not supported with context parallelism .*another process.*DDP"):
        layer(x)
    plain(x)


def test_a_compiled_layer_refuses(two, monkeypatch):
    layer = torch.compile(make(GQA), backend="eager")
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(cp_size=2))
    with pytest.raises(ValueError, match=r"KV shift is not supported with context parallelism"):
        layer(tokens(B, T))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo instantiates them
def test_a_compiled_layer_is_one_graph(two):
    torch.compiler.reset()  # a program that raised is not compiled again
    layer, x = make(GQA), tokens(B, T)
    expected, _ = layer(x)
    out, _ = torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(out, expected)
