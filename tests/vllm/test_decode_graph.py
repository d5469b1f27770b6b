"""Decoding steps in CUDA graphs, without a GPU: a graph is captured, and replayed for other batches.

Triton's interpreter runs the kernel in a separate process, because Triton chooses between compiler and interpreter when
it is imported. (tests/ops/triton/test_compiled.py compiles the kernel for GPUs.)
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.integrations.vllm_plugin import decode_check, paged_shift
from kvshift.integrations.vllm_plugin.paged_shift import PagedShift, PagedShiftMetadata, Pages, UniformBatch, kv_shift
from kvshift.ops.arguments import Call

from .captured_graph import CapturedGraph, HostWaitError
from .paged_sequences import BLOCK, HEADS, SIZE, Sequence, batch_of, make_paged_shift

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="run by test_in_the_interpreter")
SOURCE = Path(paged_shift.__file__).with_name("decode_kernel.py")
NUMBERS = 2 * SIZE  # per token, with one KV head
SEQUENCES = 6  # in the captured batch
LENGTH, PAGES = 40, 256

Sabotage = Callable[[UniformBatch], UniformBatch]


@pytest.mark.skipif(IS_INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    files = __file__, str(Path(__file__).with_name("test_paged_shift.py"))
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *files]
    ended = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-5000:]
    assert " passed" in ended.stdout.splitlines()[-1]


def kernel(right: str = "", wrong: str = "", folder: Path | None = None) -> Any:
    """Return the kernel, or a copy in `folder` whose source has `wrong` in place of `right`."""
    if folder is None:
        return paged_shift.decode_kernel()
    source, file = SOURCE.read_text(), folder / SOURCE.name
    assert source.count(right) == 1, right
    file.write_text(source.replace(right, wrong))
    spec: Any = importlib.util.spec_from_file_location("wrong_decode_kernel", file)
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.decode


class Decoding:
    """A layer, its unwritten pages, and a graph of the layer's shift in a decoding step.

    As in vLLM's runners, the graph always reads the same tensors, and is captured with a batch that has no slots.
    Expected values are computed on the CPU, also for graphs on a GPU (`test_gpu_decode_graph.py`).
    """

    device = torch.device("cpu")
    make_graph: Callable[[], Any] = CapturedGraph

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        window: int,
        drafts: int = 0,
        dtype: torch.dtype = torch.float32,
        launched: Any = None,
        sabotage: Sabotage = lambda batch: batch,
    ) -> None:
        torch.manual_seed(window)
        self.layer = make_paged_shift(monkeypatch, dtype, 1, window=window)
        self.served = deepcopy(self.layer).to(self.device)
        self.drafts, rows = drafts, window - 1 + drafts
        margin = BLOCK + rows + drafts  # a page at each end, where a wrong kernel may write
        self.pages = Pages(tokens=BLOCK, rows=rows, stride=margin, count=PAGES * margin)
        self.expected_whole = torch.full(((PAGES + 2) * margin, NUMBERS), torch.nan, dtype=dtype)
        self.whole = self.expected_whole.to(self.device, copy=True)
        self.cache = self.whole[margin:-margin]
        self.expected_cache = self.expected_whole[margin:-margin]

        tokens = SEQUENCES * (1 + drafts)
        self.kv = torch.zeros(tokens, NUMBERS + 7, dtype=dtype, device=self.device)[:, 7:]  # queries come first
        self.shifted = torch.zeros(tokens, NUMBERS, dtype=dtype, device=self.device)
        self.slots = torch.full((tokens,), -1, device=self.device)
        self.seq_lens = torch.full((SEQUENCES,), 1 + drafts, device=self.device).int()
        self.block_table = torch.zeros(SEQUENCES, LENGTH // BLOCK + 1, device=self.device).int()
        batch: Any = SimpleNamespace(
            num_reqs=SEQUENCES,
            num_actual_tokens=tokens,
            max_query_len=1 + drafts,
            slot_mapping=self.slots,
            seq_lens=self.seq_lens,
            block_table_tensor=self.block_table,
        )
        uniform = UniformBatch.from_batch(batch, self.pages)
        assert uniform is not None
        self.served.weights  # noqa: B018  # computed at start
        self.graph = self.make_graph()
        recorded = self.graph.recording(kernel() if launched is None else launched)
        monkeypatch.setattr(paged_shift, "decode_kernel", lambda: recorded)
        put_into_context(monkeypatch, self, sabotage(uniform))
        self.warm_up()
        with self.graph.capture():
            kv_shift(self.kv, self.shifted, "shift")

    def warm_up(self) -> None:
        """Do nothing. vLLM's runners run the shift before capture; here that would record its launch twice."""

    def replay(self, pieces: list[tuple[Sequence, int]], kv: Tensor) -> Tensor:
        """Write a batch into the tensors, padded as in vLLM, and return its keys and values shifted by the graph."""
        batch, tokens, sequences = batch_of(pieces), len(kv), len(pieces)
        self.kv.fill_(torch.inf)[:tokens] = kv
        self.shifted.fill_(torch.nan)
        self.slots.fill_(-1)[:tokens] = batch.slot_mapping
        self.seq_lens.fill_(0)[:sequences] = batch.seq_lens
        self.block_table.fill_(0)[:sequences, : batch.block_table_tensor.shape[1]] = batch.block_table_tensor
        self.graph.replay()
        return self.shifted[:tokens].cpu()

    def kept(self) -> Tensor:
        """Return the memory of the pages and around them."""
        return self.whole

    def shift(self, pieces: list[tuple[Sequence, int]], kv: Tensor, cache: Tensor) -> Tensor:
        """Return keys and values shifted by `shift_batch`."""
        written = torch.full_like(kv, torch.nan)
        metadata = PagedShiftMetadata.from_batch(batch_of(pieces), self.pages, self.layer.options.window)
        self.layer.shift_batch(kv, written, cache, metadata)
        return written


def put_into_context(monkeypatch: pytest.MonkeyPatch, decoding: Decoding, metadata: Any) -> None:
    """Set the forward context as vLLM's runners do before a step."""
    attention = SimpleNamespace(raw_rows=lambda: decoding.cache, pages=decoding.pages)
    context = SimpleNamespace(
        attn_metadata={"attention": SimpleNamespace(kv_shift=metadata)},
        no_compile_layers={"attention": attention, "shift": decoding.served},
    )
    monkeypatch.setattr(paged_shift, "get_forward_context", lambda: context)


@torch.no_grad()
def assert_replays_are_right(decoding: Decoding, steps: int = 24) -> None:
    """Assert that replays for changing sequences shift as `shift_batch` does and store the same bits."""
    chance, each = random.Random(decoding.drafts), 1 + decoding.drafts
    sequences: list[Sequence] = []
    born = hits = begun = 0

    def new() -> Sequence:
        nonlocal born
        born += 1
        blocks = list(range(5 * born - 4, 5 * born + 1))  # never used before
        return Sequence(decoding.kv.dtype, LENGTH, blocks, None, NUMBERS)

    for step in range(steps):
        while len(sequences) < chance.randint(2, SEQUENCES - 1):
            one, prompt = new(), chance.choice([0, BLOCK - 1, chance.randint(1, 20)])
            sequences.append(one)
            begun += not prompt
            for cache in (decoding.cache, decoding.expected_cache) if prompt else ():
                decoding.shift([(one, prompt)], one.raw[:prompt], cache)
            one.computed = prompt
        for one in sequences[: SEQUENCES - len(sequences)]:
            if (one.computed + 1) % BLOCK == 0:  # another sequence hits the block that this step fills
                twin, hits = new(), hits + 1
                twin.computed = one.computed + 1
                twin.raw[: twin.computed] = one.raw[: twin.computed]
                twin.blocks[: twin.computed // BLOCK] = one.blocks[: twin.computed // BLOCK]
                sequences.append(twin)
        chance.shuffle(sequences)
        pieces = [(one, each) for one in sequences]
        kv = torch.cat([one.raw[one.computed : one.computed + each] for one in sequences])
        shifted, expected = decoding.replay(pieces, kv), decoding.shift(pieces, kv, decoding.expected_cache)
        torch.testing.assert_close(shifted, expected, msg=lambda text, step=step: f"step {step}: {text}")
        assert torch.equal(bits(decoding.kept()), bits(decoding.expected_whole)), f"step {step}: others are kept"
        for one in sequences:
            one.computed += 1 + chance.randint(0, decoding.drafts)
            one.raw[one.computed :].normal_()  # other tokens replace rejected drafts
        sequences = [one for one in sequences if one.computed + each < LENGTH and chance.random() < 0.9]
    assert hits > 0
    assert begun > 0


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


SETTINGS = pytest.mark.parametrize(
    ("window", "drafts", "dtype"),
    [(2, 0, torch.float32), (3, 0, torch.float32), (2, 3, torch.float32), (4, 2, torch.bfloat16)],
)


@interpreted
@SETTINGS
def test_a_graph_holds_for_other_batches(
    window: int, drafts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = Decoding(monkeypatch, window, drafts, dtype)
    assert_replays_are_right(decoding)
    assert len(decoding.graph.launches) == 1
    assert decoding.graph.operations == []


WRONG = {
    "padding is kept": ("raw, mask=in_head & (slot >= 0)", "raw, mask=in_head"),
    "the pack is not looked at": ("if there & (in_table != first // TOKENS):", "if there & (in_table < 0):"),
    "another row of the ring": ("row = block * page_stride + position % TOKENS % ROWS", "row = block * page_stride"),
    "before the first token": ("    there = position >= 0", "    there = position >= -1"),
    "the piece itself is not read": ("            if lag <= q:", "            if lag < q:"),
    "a slot of another page": ("slot = block * TOKENS + position % TOKENS", "slot = block * TOKENS + position"),
}


@interpreted
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(monkeypatch, window=3, drafts=2, launched=kernel(*WRONG[name], folder=tmp_path))
    with pytest.raises(AssertionError, match=r"step|writes memory of none of its tensors"):
        assert_replays_are_right(decoding)


COPIES: dict[str, Sabotage] = {
    name: lambda batch, name=name: replace(batch, **{name: getattr(batch, name).clone()})
    for name in ("slots", "seq_lens", "block_table")
}


@interpreted
@pytest.mark.parametrize("name", COPIES)
def test_a_graph_of_copies_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of tensors hold the data of the captured batch, not of the next one."""
    with pytest.raises(AssertionError, match="step"):
        assert_replays_are_right(Decoding(monkeypatch, window=2, sabotage=COPIES[name]))


LOOKS: dict[str, Callable[[UniformBatch], Any]] = {
    "item": lambda batch: batch.seq_lens[0].item(),
    "a truth": lambda batch: bool((batch.slots >= 0).all()),
    "a list": lambda batch: batch.seq_lens.tolist(),
    "a shape": lambda batch: batch.slots[batch.slots >= 0],
    "a copy": lambda batch: batch.block_table.cpu(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_the_device_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shift = PagedShift.shift_uniform

    def looking(self: PagedShift, kv: Tensor, shifted: Tensor, rows: Tensor, batch: UniformBatch, pages: Pages) -> None:
        LOOKS[name](batch)
        shift(self, kv, shifted, rows, batch, pages)

    monkeypatch.setattr(PagedShift, "shift_uniform", looking)
    with pytest.raises(HostWaitError):
        Decoding(monkeypatch, window=2, launched=object())


def test_launches_of_a_layer_and_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are counted on meta tensors, which are not on a CPU: on the path for all batches, and on the path for
    one token of each sequence.
    """
    layer = make_paged_shift(monkeypatch, torch.bfloat16)
    layer.weights, layer.path = torch.empty(2 * HEADS, 2, device="meta"), "triton"
    pages = Pages(tokens=BLOCK, rows=1, stride=BLOCK + 1, count=100)
    numbers = 2 * HEADS * SIZE
    batch = one_token_each(SEQUENCES, torch.device("meta"))
    kv, cache = (torch.empty(rows, numbers, dtype=torch.bfloat16, device="meta") for rows in (SEQUENCES, 100))
    step, plan, shift, uniform = (CapturedGraph() for _ in range(4))

    def shift_with_a_plan(call: Call) -> tuple[Any, ...]:
        assert call.sources is not None
        return (call.k,)

    monkeypatch.setattr(paged_shift, "shift_keys_values", shift_with_a_plan)
    with step.capture():
        metadata = PagedShiftMetadata.from_batch(batch, pages, window=2)
    with plan.capture():
        metadata.plan, metadata.write_rows, metadata.is_stored  # noqa: B018  # computed by the first layer for all layers
    with shift.capture():
        layer.shift_batch(kv, torch.empty_like(kv), cache, metadata)
    monkeypatch.setattr(paged_shift, "decode_kernel", lambda: uniform.recording(defaultdict(lambda: print)))
    with uniform.capture():
        described = UniformBatch.from_batch(batch, pages)
        assert described is not None
        layer.shift_uniform(kv, torch.empty_like(kv), cache, described, pages)
    assert [name for name, _ in shift.operations] == [
        "aten::copy_",
        "aten::where.self",
        "aten::index_copy_",
    ]  # and the kernel that shifts: 4 launches per layer
    assert len(step.operations) == 48
    assert len(plan.operations) == 3
    assert uniform.operations == []
    assert [grid for grid, _ in uniform.launches] == [(SEQUENCES, 2 * HEADS)]


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"num_actual_tokens": 5}, False),  # pieces of different lengths
        ({"num_actual_tokens": 12, "max_query_len": 2}, False),  # longer than the ring
    ],
)
def test_pieces_of_one_length_are_a_uniform_batch(change: dict[str, int], taken: bool) -> None:
    batch = one_token_each(SEQUENCES, torch.device("cpu"))
    vars(batch).update(change)
    pages = Pages(tokens=BLOCK, rows=1, stride=BLOCK + 1, count=100)
    assert (UniformBatch.from_batch(batch, pages) is not None) is taken


def one_token_each(sequences: int, device: torch.device) -> Any:
    """Return a batch with one token per sequence and arbitrary data."""
    return SimpleNamespace(
        num_reqs=sequences,
        num_actual_tokens=sequences,
        max_query_len=1,
        query_start_loc=torch.empty(sequences + 1, dtype=torch.int32, device=device),
        query_start_loc_cpu=range(sequences + 1),
        slot_mapping=torch.empty(sequences, dtype=torch.int64, device=device),
        seq_lens=torch.empty(sequences, dtype=torch.int32, device=device),
        block_table_tensor=torch.empty(sequences, 5, dtype=torch.int32, device=device),
    )


def test_a_graph_of_other_batches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of such a shift would hold results for the batch that it was captured with."""
    layer = make_paged_shift(monkeypatch, torch.float32)
    kv: Any = SimpleNamespace(is_cuda=True)
    context = SimpleNamespace(attn_metadata=None, no_compile_layers={"shift": layer})
    monkeypatch.setattr(paged_shift, "get_forward_context", lambda: context)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="shift: in a CUDA graph, all sequences must have equally many new tokens"):
        kv_shift(kv, kv, "shift")


def test_coefficients_that_are_loaded_again_are_where_graphs_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_paged_shift(monkeypatch, torch.float32)
    with torch.inference_mode():
        weights = layer.weights
    before = weights.clone()
    layer.load_heads(layer.alpha, torch.full((HEADS, 2), 2.0))
    assert layer.weights is weights
    assert torch.equal(weights, torch.cat([torch.full((HEADS, 2), 2.0), before[HEADS:]]))


@interpreted
def test_the_kernel_passes_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for window in (2, 5):
        layer = make_paged_shift(monkeypatch, torch.bfloat16, window=window)
        layer.path = "triton"
        assert layer.supports_uniform


@interpreted
@pytest.mark.parametrize("name", ["the pack is not looked at", "before the first token"])
def test_a_wrong_kernel_is_not_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_check, "_VERDICTS", {})
    launched = kernel(*WRONG[name], folder=tmp_path)
    monkeypatch.setattr(paged_shift, "decode_kernel", lambda: launched)
    layer = make_paged_shift(monkeypatch, torch.float32)
    layer.path = "triton"
    with pytest.warns(RuntimeWarning, match="the kernel for decoding gives other results on cpu"):
        assert not layer.supports_uniform


def test_a_cpu_takes_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not make_paged_shift(monkeypatch, torch.float32).supports_uniform
