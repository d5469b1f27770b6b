"""One optimizer step of a sharded model, without its memory: fake tensors, and a process group that only pretends.

Every operation of a step of FSDP2 is called with the shapes that one process of many would have: the model is built,
sharded layer by layer, run forward and backward, and stepped by AdamW. What that process would hold is counted from its
tensors, beside the formulas of `cost.py`. Nothing is computed, and nothing is said of time.
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
    """What the first process holds after a step; its shards are the largest.

    Attributes:
        parameters: of the whole model, numbers.
        weights, gradients, optimizer: bytes.
        gathered: bytes of the largest group of weights that is gathered at once, in the precision of its products.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int


def dry_run(config: KVShiftLlamaConfig, *, devices: int, sequence_length: int, batch_size: int = 1) -> Shards:
    """A step of `config` in float32 with products in bfloat16, sharded over `devices` as FSDP2 does.

    Args:
        config: of the model.
        devices: processes, of which this one plays the first.
        sequence_length: tokens in a sequence.
        batch_size: sequences of each process.

    Raises:
        ValueError: a size is below 1, or a process group is in use.
    """
    for name, value in (("devices", devices), ("sequence_length", sequence_length), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    with _pretended(devices) as mesh, FakeTensorMode():
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
        ids = torch.zeros(batch_size, sequence_length, dtype=torch.long)
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
    """Of this process's shards."""
    shards = [tensor.to_local() for tensor in tensors]
    return sum(shard.numel() * shard.element_size() for shard in shards)


@contextmanager
def _pretended(devices: int) -> Iterator[Any]:
    """A mesh over processes that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    if dist.is_initialized():
        raise ValueError("a dry run needs a process group of its own, and one is in use")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        yield init_device_mesh("cpu", (devices,))
    finally:
        dist.destroy_process_group()
