"""The program of one of the processes that compare a parallel model with the whole one in `test_parallel.py`.

RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 python -m tests.models.llama.parallel_worker tensor CHECKPOINT RENDEZVOUS
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from kvshift.models import retrofit  # noqa: F401  # registers its families
from kvshift.models.llama import KVShiftLlamaForCausalLM

from .checks import new_tokens_of
from .tiny import left_padded, random_tokens

# Sums over heads and sequences have a different order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def batch() -> tuple[Tensor, Tensor]:
    return left_padded([random_tokens(9), random_tokens(5, seed=1)])


def gradients_of(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    model.train()
    model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], msg=lambda m, n=name: f"{n}: {m}", **TOLERANCE)


def tensor_parallel(path: str, one: KVShiftLlamaForCausalLM) -> None:
    """Heads and their coefficients are sharded."""
    model = KVShiftLlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_plan="auto"))
    alpha = model.model.layers[0].self_attn.shift.alpha
    heads = one.config.num_key_value_heads
    assert (alpha.shape[0], alpha.to_local().shape[0]) == (heads, heads // dist.get_world_size())
    ids, mask = batch()
    with torch.no_grad():
        torch.testing.assert_close(
            whole(model(ids, attention_mask=mask).logits), one(ids, attention_mask=mask).logits, **TOLERANCE
        )
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 2}):
        expected = new_tokens_of(one, ids, mask)
        torch.testing.assert_close(new_tokens_of(model, ids, mask, **options), expected, rtol=0, atol=0)
    compare(gradients_of(model, ids, mask), gradients_of(one, ids, mask))


def refused(path: str, one: PreTrainedModel) -> None:
    """Another family is refused: its plan shards the heads, but not their coefficients."""
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_plan="auto"))
    ids = random_tokens(2, 9)
    one(ids)
    with pytest.raises(ValueError, match=r"alpha must be \(heads, window\) with 1 heads"):
        model(ids)


def data_parallel(path: str, one: KVShiftLlamaForCausalLM) -> None:
    """Each process gets one sequence; gradients are averaged."""
    model = KVShiftLlamaForCausalLM.from_pretrained(path)
    ids = random_tokens(2, 9)
    mask, row = torch.ones_like(ids), ids[dist.get_rank()].unsqueeze(0)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    compare(
        {name.removeprefix("module."): g for name, g in gradients_of(parallel, row, torch.ones_like(row)).items()},
        gradients_of(one, ids, mask),
    )


def fully_sharded(path: str, one: KVShiftLlamaForCausalLM) -> None:
    """Every parameter is sharded; in a bfloat16 model, the float32 coefficients need separate groups."""
    ids = random_tokens(2, 9)
    row = ids[dist.get_rank()].unsqueeze(0)
    expected = gradients_of(one, ids, torch.ones_like(ids))
    for dtype in (torch.float32, torch.bfloat16):
        model = KVShiftLlamaForCausalLM.from_pretrained(path, dtype=dtype)
        for layer in model.model.layers:
            if dtype != torch.float32:
                fully_shard(layer.self_attn.shift)
            fully_shard(layer)
        fully_shard(model)
        gradients = gradients_of(model, row, torch.ones_like(row))
        if dtype == torch.float32:
            compare(gradients, expected)
        for name, gradient in gradients.items():
            assert gradient.dtype == (torch.float32 if ".shift." in name else dtype), name
            assert torch.cosine_similarity(gradient.float().flatten(), expected[name].flatten(), dim=0) > 0.99, name


def main(rendezvous: str, *jobs: str) -> None:
    """Run the jobs, each given as a kind and a checkpoint: `tensor=PATH`."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    kinds = {"tensor": tensor_parallel, "refused": refused, "data": data_parallel, "shards": fully_sharded}
    for job in jobs:
        kind, path = job.split("=", 1)
        kinds[kind](path, AutoModelForCausalLM.from_pretrained(path))
        print(f"passed: {job}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # skip teardown: gloo's threads of several groups do not always end cleanly
