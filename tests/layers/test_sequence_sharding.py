"""Detection of sequence parallelism in one process; `tests/models/test_sharded_sequences.py` uses two."""

import functools
import re
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import modeling_flash_attention_utils
from transformers.integrations import flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
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


def attend(*args, **kwargs):
    raise AssertionError("attention was reached")


@functools.wraps(sdpa_attention_forward)
def attend_like_sdpa(*args, **kwargs):
    return attend()


class Attend:
    """An attention function that is an object."""

    __call__ = attend


BY = rf"was replaced by {__name__}\."


@pytest.mark.parametrize("function", [attend, attend_like_sdpa, Attend(), functools.partial(attend, 1)])
@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention", "eager"])
@pytest.mark.parametrize("mapping", ["_local_mapping", "_global_mapping"])
def test_attention_of_transformers_that_was_replaced(two, monkeypatch, mapping: str, name: str, function):
    """As by DeepSpeed's Ulysses (an item of the interface) or by a call of `register`, whatever the function's name."""
    monkeypatch.setitem(getattr(ALL_ATTENTION_FUNCTIONS, mapping), name, function)
    found = sequence_parallelism()
    assert found is not None
    assert found.startswith(f"sequence parallelism (attention '{name}' was replaced by ")
    assert "register it with transformers.AttentionInterface under a new name" in found


def test_a_kernel_that_was_replaced(two, monkeypatch):
    """DeepSpeed's Ulysses also replaces kernels of the hub, which transformers registers when they are first used."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "kernels-community/flash-attn2", lambda *args: None)
    assert sequence_parallelism() is None
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "kernels-community/flash-attn2", attend)
    assert re.search(BY + "attend;", str(sequence_parallelism()))


@pytest.mark.parametrize("module", [flash_attention, modeling_flash_attention_utils])
def test_the_function_behind_flash_attention_that_was_replaced(two, monkeypatch, module):
    """As by verl and ring_flash_attn."""
    monkeypatch.setattr(module, "_flash_attention_forward", attend)
    assert re.search(rf"{module.__name__}._flash_attention_forward {BY}attend;", str(sequence_parallelism()))


def test_scaled_dot_product_attention_that_was_replaced(two, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    assert re.search(BY + "attend;", str(sequence_parallelism()))
    with pytest.raises(ValueError, match=r"KV shift is not supported with sequence parallelism \(scaled_dot_product"):
        make(GQA)(tokens(B, T))


@pytest.mark.parametrize("name", ["sdpa_mine", "flash_attention_mine", "eager_mine", "owner/kernel"])
@pytest.mark.parametrize("mapping", ["_local_mapping", "_global_mapping"])
def test_attention_under_a_new_name_is_not_refused(two, monkeypatch, mapping: str, name: str):
    monkeypatch.setitem(getattr(ALL_ATTENTION_FUNCTIONS, mapping), name, attend)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", ALL_ATTENTION_FUNCTIONS["sdpa"])  # put back
    assert sequence_parallelism() is None


@pytest.mark.parametrize(("names", "refused"), [(("cp",), True), (("dp", "sp"), True), (("dp", "tp"), False)])
def test_an_active_mesh(two, monkeypatch, names: tuple[str, ...], refused: bool):
    monkeypatch.undo()
    mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    monkeypatch.setattr(type(mesh), "shape", (2,) * len(names))
    assert sequence_parallelism() is None  # it exists, but nothing runs on it
    with mesh:
        assert (sequence_parallelism() is not None) == refused
    assert sequence_parallelism() is None


def test_neither_accelerate_nor_transformers_is_needed(two, monkeypatch):
    for name in ("accelerate.state", "transformers.modeling_utils"):
        monkeypatch.delitem(sys.modules, name)
    assert sequence_parallelism() is None


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_the_layer_refuses(two, monkeypatch, compiled: bool):
    layer, plain, x = make(GQA), make(GQA, shift_targets=()), tokens(B, T)
    if compiled:
        layer = torch.compile(layer, backend="eager")
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(cp_size=2))
    with pytest.raises(ValueError, match=r"KV shift is not supported with context parallelism .*another process.*DDP"):
        layer(x)
    plain(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo instantiates them
def test_a_compiled_layer_is_one_graph(two):
    torch.compiler.reset()  # a program that raised is not compiled again
    layer, x = make(GQA), tokens(B, T)
    expected, _ = layer(x)
    out, _ = torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(out, expected)
