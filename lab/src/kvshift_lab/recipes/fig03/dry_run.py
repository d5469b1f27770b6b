"""Dry run of one optimizer step of a sharded model, with fake tensors and a fake process group.

Every operation of a step with FSDP2 is called with the shapes that one process of many would have: the model is built,
sharded layer by layer, run forward and backward, and stepped by AdamW. The memory of that process is counted from its
tensors, as a check of the formulas in `kvshift_lab.study.cost`. Nothing is computed, no memory is allocated, and no
time is estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM


@dataclass(frozen=True)
class Shards:
    """Memory of the first process after a step. Its shards are the largest.

    Attributes:
        parameters: Number of parameters of the whole model.
        weights, gradients, optimizer: Bytes of this process's shards.
        gathered: Bytes of the largest group of weights that is gathered at once, in bfloat16.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int


def dry_run(config: KVShiftLlamaConfig, *, devices: int, sequence_length: int) -> Shards:
    """Run one step with float32 weights and bfloat16 matrix products, sharded over `devices` with FSDP2.

    Each process has one sequence.

    Args:
        config: Configuration of the model.
        devices: Number of processes; this one takes the place of the first.
        sequence_length: Tokens per sequence.

    Raises:
        ValueError: A size is below 1, or a process group already exists.
    """
    for name, value in (("devices", devices), ("sequence_length", sequence_length)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    with _fake_device_mesh(devices) as mesh, FakeTensorMode():
        model: Any = KVShiftLlamaForCausalLM(config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.model.layers]
        others = parameters - sum(layers)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            if config.shift_targets:  # coefficients stay float32, as in training
                whole = MixedPrecisionPolicy(cast_forward_inputs=False)
                fully_shard(layer.self_attn.shift, mesh=mesh, mp_policy=whole)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.zeros(1, sequence_length, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        moments = [
            value for state in optimizer.state.values() for name, value in state.items() if name.startswith("exp_avg")
        ]
        return Shards(
            parameters=parameters,
            weights=_bytes(model.parameters()),
            gradients=_bytes(parameter.grad for parameter in model.parameters()),
            optimizer=_bytes(moments),
            gathered=2 * max(*layers, others),
        )


def _bytes(tensors: Any) -> int:
    """Return the total size in bytes of this process's shards."""
    shards = [tensor.to_local() for tensor in tensors]
    return sum(shard.numel() * shard.element_size() for shard in shards)


@contextmanager
def _fake_device_mesh(devices: int) -> Iterator[Any]:
    """Create a device mesh over fake processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    if dist.is_initialized():
        raise ValueError("a dry run initializes its own process group, but one is already initialized")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        yield init_device_mesh("cpu", (devices,))
    finally:
        dist.destroy_process_group()
