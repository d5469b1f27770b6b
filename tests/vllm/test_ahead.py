"""Asynchronous scheduling: each step is planned before the tokens of the previous step are known.

vLLM does this only on GPUs. Here nothing runs concurrently: on a CPU vLLM's streams and events do nothing, and the work
is done in the order in which it is submitted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvshift.models.llama import KVShiftLlamaForCausalLM

from .engines import different, drawn, engine


@pytest.fixture
def planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True  # `check` has turned it off

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))


@pytest.mark.parametrize("with_drafts", [False, True])
def test_steps_planned_ahead(checkpoint: Callable[[str], Path], planned_ahead: None, with_drafts: bool) -> None:
    model: Any = KVShiftLlamaForCausalLM.from_pretrained(checkpoint("llama")).eval()
    options: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 16, "num_gpu_blocks_override": 24}
    if with_drafts:
        method = {"method": "draft_model", "model": str(checkpoint("draft")), "num_speculative_tokens": 3}
        options |= {"speculative_config": method}
    start, *ends = drawn(70, *range(1, 40, 4), seed=22)
    prompts = [[*start, *end] for end in ends] + drawn(1, 2, 3, 31, 32, 33, 63, 64, 65, 130, 200, seed=23)
    with engine(checkpoint("llama"), **options) as running:
        ahead = 0
        schedule = running.scheduler.schedule

        def watched(*args: Any, **more: Any) -> Any:
            nonlocal ahead
            ahead += sum(request.num_output_placeholders > 0 for request in running.scheduler.running)
            return schedule(*args, **more)

        running.scheduler.schedule = watched
        outputs = [output for _ in range(2) for output in running.generate(prompts, tokens=24)]
        assert isinstance(running.scheduler, AsyncScheduler)
        assert ahead > 100
        assert running.preemptions > 0
        assert not with_drafts or running.rejected > 100
        assert max(running.chunks(output) for output in outputs) > 1
    assert max(output.num_cached_tokens or 0 for output in outputs) >= 64
    assert different(model, outputs) == []
