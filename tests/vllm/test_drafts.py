"""Draft models with a KV shift."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvshift.models import baichuan_m1  # noqa: F401  # registers its classes
from kvshift.models.llama import KVShiftLlamaForCausalLM

from .engines import different, drawn, engine


@torch.no_grad()
def test_a_draft_model_with_a_shift(checkpoint: Callable[[str], Path]) -> None:
    """The answers are the model's, and each draft consists of the likeliest tokens by the draft model."""
    model, drafting = (
        KVShiftLlamaForCausalLM.from_pretrained(checkpoint(name)).eval() for name in ("llama", "draft-with-shift")
    )
    method = {"method": "draft_model", "model": str(checkpoint("draft-with-shift")), "num_speculative_tokens": 3}
    start, *ends = drawn(70, *range(1, 40, 4), seed=18)
    prompts = [[*start, *end] for end in ends] + drawn(1, 2, 3, 31, 32, 33, 63, 64, 65, 130, seed=19)
    options: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 16, "num_gpu_blocks_override": 24}
    with engine(checkpoint("llama"), speculative_config=method, **options) as running:
        outputs = [output for _ in range(2) for output in running.generate(prompts, tokens=16)]
        drafts = running.drafts
        assert running.rejected > 100
        assert running.preemptions > 0
        assert max(running.chunks(output) for output in outputs) > 2
    assert max(output.num_cached_tokens or 0 for output in outputs) >= 64
    assert different(model, outputs) == []
    for tokens, draft in drafts:
        logits = drafting(torch.tensor([[*tokens, *draft]]), use_cache=False).logits[0, len(tokens) - 1 : -1]
        assert logits.argmax(-1).tolist() == draft


@pytest.mark.parametrize("name", ["mistral-sliding", "baichuan-m1"])
def test_a_draft_model_beside_windows(name: str, checkpoint: Callable[[str], Path]) -> None:
    """It is served if vLLM keeps the same tokens for all layers, and refused otherwise."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(name)).eval()
    method = {"method": "draft_model", "model": str(checkpoint("draft-with-shift")), "num_speculative_tokens": 3}
    with engine(checkpoint(name), speculative_config=method, disable_hybrid_kv_cache_manager=True) as running:
        outputs = running.generate(drawn(*range(1, 120, 3), seed=6))
        assert running.rejected > 100
    assert different(model, outputs) == []
