"""Tensor parallelism: two processes have half of the heads each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshift.models.baichuan_m1 import BaichuanM1ForCausalLM

from .engines import count, different, drawn, engine

PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def test_tensor_parallel(checkpoint: Callable[[str], Path]) -> None:
    """KV heads of sliding layers are split; the single KV head of the other layers is in both processes."""
    folder = checkpoint("baichuan-m1")
    model: Any = BaichuanM1ForCausalLM.from_pretrained(folder).eval()
    start, *ends = drawn(70, *range(1, 40, 4), seed=16)
    prompts = [[*start, *end] for end in ends] + drawn(1, 2, 3, 31, 32, 33, 130, 200, seed=17)
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 16, "num_gpu_blocks_override": 30}
    with engine(folder, **options, **PARALLEL) as running:
        outputs = [output for _ in range(2) for output in running.generate(prompts, tokens=16)]
        assert max(running.chunks(output) for output in outputs) > 2
        assert running.preemptions > 0
        heads = running.llm.collective_rpc(local_heads)
    assert heads == [[1, 2, 1, 2]] * 2
    assert max(count(outputs)) >= 64
    assert different(model, outputs) == []


def local_heads(worker: Any) -> list[int]:
    """Return the number of KV heads of each layer's shift in this process."""
    return [layer.self_attn.shift.alpha.shape[0] for layer in worker.get_model().model.layers]
