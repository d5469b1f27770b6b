"""The paper's sizes on the meta device, sharded for its numbers of GPUs, and configurations that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.testing._internal.distributed.fake_pg import FakeStore

from kvshift import ShiftOptions

from tests.titan import on_cpu  # noqa: F401  # isort: skip  # before torchtitan

from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from kvshift.integrations.titan import config_registry
from kvshift.integrations.titan.with_shift import with_kv_shift
from kvshift.models.llama import KVShiftLlamaForCausalLM, size_config

SIZES = {"1.5B": 64, "2.9B": 512, "6.7B": 64, "13B": 128, "19B": 240}


def paper(size: str) -> Any:
    return getattr(config_registry, f"paper_{size.lower().replace('.', '_')}")()


def shift_parameters(model: torch.nn.Module) -> int:
    return sum(x.numel() for name, x in model.named_parameters() if ".shift." in name)


@pytest.fixture
def gpus(request) -> Iterator[int]:
    """The size of a process group of which only rank 0 exists."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(("size", "gpus"), SIZES.items(), indirect=["gpus"])
def test_a_size_of_the_paper(size: str, gpus: int):
    config = paper(size)
    config.parallelism.spmd_backend = "partial_dtensor"
    spec, training = config.model_spec, config.training
    assert training.seq_len == size_config(size).max_position_embeddings
    with torch.device("meta"):
        model = spec.model.build()
        expected = KVShiftLlamaForCausalLM(size_config(size))
    total = sum(x.numel() for x in expected.parameters())
    assert sum(x.numel() for x in model.parameters()) == total
    assert shift_parameters(model) == shift_parameters(expected)

    dims = ParallelDims(
        dp_replicate=1, dp_shard=gpus, cp=1, tp=1, pp=1, ep=1, world_size=gpus, spmd_backend="partial_dtensor"
    )
    dims.build_mesh()
    spec.parallelize_fn(
        model, parallel_dims=dims, training=training, parallelism=config.parallelism, compile_config=config.compile,
        ac_config=config.activation_checkpoint, dump_folder="",
    )  # fmt: skip
    here = sum(4 * x.to_local().numel() for x in model.parameters())  # rank 0 has the largest shard of each
    assert here == pytest.approx(4 * total / gpus, rel=0.02)


@pytest.mark.parametrize("size", SIZES)
def test_steps_and_rows_are_those_of_the_paper(size: str):
    tokens = {"1.5B": 10e9, "2.9B": 500e9, "6.7B": 10e9, "13B": 10e9, "19B": 200e9}[size]
    training = paper(size).training
    step = SIZES[size] * training.local_batch_size * training.seq_len
    assert step * (training.steps - 1) < tokens <= step * training.steps


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="config must be that of a Llama 3 or Qwen 3 model, got DeepSeek"):
        with_kv_shift(deepseek_v3_debugmodel())


def test_a_second_shift_is_refused():
    config = with_kv_shift(llama3_debugmodel())
    with pytest.raises(ValueError, match=r"attention must be a GQAttention\.Config of torchtitan, got ShiftedGQ"):
        with_kv_shift(config)


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_a_layout_that_is_not_known_is_refused(gpus: int):
    config = with_kv_shift(llama3_debugmodel())
    config.parallelism.context_parallel_load_balancer = "ptrr"
    dims = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=2, tp=1, pp=1, ep=1, world_size=2, spmd_backend="partial_dtensor"
    )
    dims.build_mesh()
    with torch.device("meta"):
        model = config.model_spec.model.build()
    with pytest.raises(NotImplementedError, match="must be headtail or None with KV shift, got 'ptrr'"):
        config.model_spec.parallelize_fn(model, parallel_dims=dims, parallelism=config.parallelism)


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_the_default_backend_is_refused_on_an_older_torch(gpus: int, monkeypatch):
    """torchtitan 0.3.0 calls FSDP with the interface of torch 2.14."""
    config = with_kv_shift(llama3_debugmodel())
    assert config.parallelism.spmd_backend == "spmd_types"
    dims = ParallelDims.from_config(config.parallelism, gpus)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with pytest.raises(NotImplementedError, match=r"spmd_backend must be partial_dtensor with torch 2\.13\.0\+cpu"):
        config.model_spec.parallelize_fn(None, parallel_dims=dims, parallelism=config.parallelism)


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_pipelines_are_refused_where_schedules_take_no_microbatches(gpus: int, monkeypatch):
    config = with_kv_shift(llama3_debugmodel())
    config.parallelism = replace(
        config.parallelism,
        spmd_backend="partial_dtensor",
        pipeline_parallel_degree=gpus,
        data_parallel_shard_degree=1,
    )
    dims = ParallelDims.from_config(config.parallelism, gpus)
    monkeypatch.setattr(PipelineScheduleSingle, "step", lambda self, *args, target=None: None)  # as in torch 2.13
    with pytest.raises(NotImplementedError, match=r"pipeline_parallel_degree must be 1 with torch .*, got 2"):
        config.model_spec.parallelize_fn(None, parallel_dims=dims, parallelism=config.parallelism)


def test_context_parallelism_by_another_configuration_is_refused():
    config = with_kv_shift(llama3_debugmodel())
    with torch.device("meta"):
        attention = config.model_spec.model.layers[0].attention.build()
    with pytest.raises(NotImplementedError, match="needs a configuration made by with_kv_shift"):
        attention.parallelize(SimpleNamespace(cp_enabled=True))


def test_coefficients_are_left_out_of_decay_and_clamped():
    config = with_kv_shift(llama3_debugmodel(), ShiftOptions(constraint="clamp"))
    config.optimizer.implementation = "for-loop"
    model = config.model_spec.model.build()
    optimizers = config.optimizer.build(model_parts=[model])
    config.model_spec.post_optimizer_build_fn(optimizers, [model], None)
    (optimizer,) = optimizers.optimizers
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert len(kept["param_names"]) == 2 * 6
    assert all(".shift." in name for name in kept["param_names"])
    assert not any(".shift." in name for name in decayed["param_names"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        for parameter in kept["params"]:
            parameter.fill_(1.5)
    optimizers.step()
    assert all((parameter == 1).all() for parameter in kept["params"])
