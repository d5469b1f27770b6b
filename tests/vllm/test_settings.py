"""vLLM's answers are the model's own, token by token, in every way in which its scheduler can cut up the work.

Each test asserts that what it is about did happen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.config import CompilationMode
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvshift.integrations.vllm_plugin.paged_shift import Pages
from kvshift.models import baichuan_m1  # noqa: F401  # registers its classes
from kvshift.models.llama import KVShiftLlamaForCausalLM

from .engines import Engine, compared, count, different, drawn, engine

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return KVShiftLlamaForCausalLM.from_pretrained(folder).eval()


def test_prompts_of_different_lengths_in_one_batch(folder: Path, model: Any) -> None:
    lengths = [1, 1, 2, 3, 5, 13, 31, 32, 33, 63, 64, 65, 95, 96, 97, 128, 170, 255, 256, 300] * 2
    with engine(folder) as running:
        outputs = running.generate(drawn(*lengths), tokens=24)
    assert different(model, outputs) == []


@pytest.mark.parametrize("name", ["qwen3-sliding", "baichuan-m1"])
def test_compiled(name: str, checkpoint: Checkpoint) -> None:
    """As vLLM runs a model where nothing else is asked for."""
    answers_compiled(checkpoint(name))


def test_compiled_code_does_nothing_between_projection_and_shift(folder: Path, model: Any) -> None:
    """No copy of queries, keys and values, which an operator that works in place would cost."""
    with fresh_cache():
        _, codes = run_and_get_code(answers_compiled, folder)  # vLLM compiles its ranking of logprobs too
    of_the_model = [code for code in codes if "torch.ops._C.onednn_mm" in code]  # several where sizes have been seen
    assert of_the_model
    for code in of_the_model:
        *before_shifts, _ = code[code.index("def call(") :].split("torch.ops.vllm.kv_shift")
        assert len(before_shifts) == model.config.num_hidden_layers
        for before in before_shifts:
            assert "cpp_fused" not in before.rsplit("torch.ops._C.onednn_mm", 1)[1]  # a loop of the compiler's


def answers_compiled(folder: Path) -> None:
    """Right answers."""
    with engine(folder, enforce_eager=False) as running:
        outputs = running.generate(drawn(*range(1, 120, 3), seed=4), tokens=24)
        assert running.llm.llm_engine.vllm_config.compilation_config.mode != CompilationMode.NONE
    assert different(AutoModelForCausalLM.from_pretrained(folder).eval(), outputs) == []


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prompts_in_chunks(folder: Path, model: Any, chunk: int) -> None:
    with engine(folder, long_prefill_token_threshold=chunk, enable_chunked_prefill=True) as running:
        outputs = running.generate(drawn(*range(1, 120, 3), seed=chunk))
        chunks = [running.chunks(output) for output in outputs]
    assert max(chunks) >= 118 // chunk
    assert different(model, outputs) == []


def test_a_small_budget_of_tokens_for_each_step(folder: Path, model: Any) -> None:
    with engine(folder, max_num_batched_tokens=16, max_num_seqs=8) as running:
        outputs = running.generate(drawn(*range(1, 120, 3), seed=3))
        chunks = [running.chunks(output) for output in outputs]
    assert max(chunks) > 7
    assert different(model, outputs) == []


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_prefix_hits_of_every_length_around_the_edges_of_blocks(folder: Path, model: Any, block_size: int) -> None:
    first, second = drawn(2 * block_size + 3, 2 * block_size + 3, seed=block_size)
    shared = [*range(block_size - 2, block_size + 3), *range(2 * block_size - 2, 2 * block_size + 3)]
    prompts = [[*first[:length], *second[length:]] for length in shared] + [first[:length] for length in shared]
    with engine(folder, block_size=block_size, num_gpu_blocks_override=256) as running:
        outputs = [output for _ in range(2) for output in running.generate(prompts, tokens=8)]
        hits = count(outputs)
        pages = {layer.attn.pages for layer in attentions(running)}
    assert hits[block_size] > 0
    assert hits[2 * block_size] > 0
    assert pages == {Pages(tokens=block_size, rows=1, stride=block_size + 1, count=255 * (block_size + 1) + 1)}
    assert different(model, outputs) == []


def test_blocks_of_16(folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's attention on a CPU has a kernel for them, and does not offer it; on GPUs they are the default."""
    offered = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", offered)
    first, second = drawn(70, 70, seed=20)
    lengths = [1, 15, 16, 17, 30, 31, 32, 33, 47, 48, 49, 63, 64, 65]
    prompts = [[*first[:length], *second[length:]] for length in lengths] + [first[:length] for length in lengths]
    with engine(
        folder, block_size=16, num_gpu_blocks_override=32, max_num_batched_tokens=40, max_num_seqs=16
    ) as running:
        outputs = [output for _ in range(2) for output in running.generate(prompts)]
        assert {layer.attn.pages for layer in attentions(running)} == {
            Pages(tokens=16, rows=1, stride=17, count=31 * 17 + 1)
        }
        assert max(running.chunks(output) for output in outputs) > 1
        assert running.preemptions > 0
    hits = count(outputs)
    assert min(hits[16], hits[32], hits[48], hits[64]) > 0
    assert different(model, outputs) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        *((name, {"disable_hybrid_kv_cache_manager": True}) for name in ("llama", "qwen3-sliding", "baichuan-m1")),
    ],
)
def test_a_prefix_is_hit_by_requests_of_the_same_batch(
    name: str, options: dict[str, Any], checkpoint: Checkpoint
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(name)).eval()
    start, *ends = drawn(100, *[5] * 12, seed=9)
    with engine(checkpoint(name), max_num_batched_tokens=256, **options) as running:
        outputs = running.generate([[*start, *end] for end in ends] + [start] * 4)
        outputs += running.generate([[*start, *end, 1] for end in ends] + [start, start[:70]])
    assert sum(hits * requests for hits, requests in count(outputs).items()) > 1000
    assert different(model, outputs) == []


def test_preempted_requests_begin_again(folder: Path, model: Any) -> None:
    with engine(folder, num_gpu_blocks_override=40, max_num_seqs=16) as running:
        outputs = running.generate(drawn(*range(60, 100), seed=4), tokens=64)
        preemptions, free = running.preemptions, running.free_blocks
    assert preemptions > 0
    assert free == 39  # all but the null block
    assert different(model, outputs) == []


def test_drafts_by_a_model(folder: Path, model: Any, checkpoint: Checkpoint) -> None:
    drafts = {"method": "draft_model", "model": str(checkpoint("draft")), "num_speculative_tokens": 3}
    with engine(folder, speculative_config=drafts) as running:
        outputs = running.generate(drawn(*range(1, 120, 3), seed=6))
        rejected = running.rejected
        assert {layer.attn.pages.rows for layer in attentions(running)} == {1 + 3 + 1}
    assert rejected > 100
    assert different(model, outputs) == []


def test_aborted_requests_leave_the_others_alone(folder: Path, model: Any) -> None:
    prompts = drawn(*range(30, 70), seed=11)
    greedy = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True, detokenize=False)
    with engine(folder, max_num_batched_tokens=64, max_num_seqs=16) as running:
        free = running.free_blocks
        core: Any = running.llm.llm_engine
        for i, prompt in enumerate(prompts):
            core.add_request(str(i), {"prompt_token_ids": prompt}, greedy)
        outputs, steps = [], 0
        while core.has_unfinished_requests():
            outputs += [output for output in core.step() if output.finished]
            steps += 1
            if steps % 4 == 0:
                some = str(steps // 4 * 3)  # it computes its prompt, or answers, or waits
                core.abort_request([some])
        assert len(outputs) < len(prompts) - 5
        assert running.free_blocks == free
        outputs += running.generate(prompts)
    assert different(model, outputs) == []


def test_restarts(folder: Path, model: Any) -> None:
    """An engine ends in the middle of its work; the next one over the same checkpoint knows nothing of it."""
    start, *ends = drawn(64, *range(1, 40, 4), seed=21)
    prompts = [[*start, *end] for end in ends]
    greedy = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True, detokenize=False)
    with engine(folder) as running:
        for i, prompt in enumerate(prompts):
            running.llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy)
        for _ in range(8):
            running.llm.llm_engine.step()
        assert running.scheduler.running
    with engine(folder) as running:
        outputs = running.generate(prompts[:1]) + running.generate(prompts)
    assert [output.num_cached_tokens for output in outputs[:2]] == [0, 64]
    assert different(model, outputs) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(folder: Path, dtype: torch.dtype) -> None:
    """Sums are rounded in another order, so tokens may differ; logprobs stay within what the dtype resolves."""
    model = KVShiftLlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with engine(folder, dtype=str(dtype).removeprefix("torch.")) as running:
        outputs = running.generate(drawn(*range(1, 120, 3), seed=12), tokens=4)
    errors = torch.cat([compared(model, output)[1] for output in outputs])
    assert errors.mean() < 12 * torch.finfo(dtype).eps


def attentions(running: Engine) -> list[Any]:
    """Those of all layers."""
    (model,) = running.llm.apply_model(lambda model: model)
    return [layer.self_attn for layer in model.model.layers]
