"""The shift of a layer over paged rows equals the formula in many steps of many sequences, without an engine."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.integrations.vllm_plugin import paged_shift
from kvshift.integrations.vllm_plugin.paged_shift import PagedShift, PagedShiftMetadata, Pages
from kvshift.ops import dispatch

from ..ops.conftest import leave_to_one_dtype, skip_unless_built
from .paged_sequences import BLOCK, BLOCKS, HEADS, NUMBERS, SIZE, Sequence, batch_of, make_paged_shift


def expected(layer: PagedShift, raw: Tensor) -> Tensor:
    """Return all tokens of a sequence shifted at once by the formula."""
    x, total = raw.float().view(-1, 2 * HEADS, SIZE), torch.zeros(())
    coefficients = layer.coefficients()
    as_it_is = torch.eye(1, layer.options.window).expand(HEADS, -1)
    weights = torch.cat([coefficients.get(target, as_it_is) for target in ("k", "v")])
    for lag in range(layer.options.window):
        before = torch.nn.functional.pad(x, (0, 0, 0, 0, lag, 0))[: len(x)]
        total = total + weights[:, lag, None] * before
    return total.to(raw.dtype).view(-1, NUMBERS)


OPTIONS: dict[str, dict[str, Any]] = {
    "keys and values": {},
    "keys": {"targets": ("k",)},
    "values, clamped": {"targets": ("v",), "constraint": "clamp"},
    "gate": {"constraint": "gate"},
    "window 3": {"window": 3},
}


@torch.no_grad()
@pytest.mark.parametrize("backend", ["cpu", "eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_token_is_shifted_as_in_its_whole_sequence(
    monkeypatch: pytest.MonkeyPatch, name: str, drafts: int, dtype: torch.dtype, backend: str
) -> None:
    """Steps mix whole and chunked prompts, decoding, rejected drafts, and hits of blocks that the same batch fills."""
    skip_unless_built(backend)
    leave_to_one_dtype(backend, dtype)
    monkeypatch.setattr(dispatch, "_AUTO", backend)
    chance = random.Random(drafts)
    torch.manual_seed(drafts)
    lags = OPTIONS[name].get("window", 2) - 1
    stride = BLOCK + lags + 2 * drafts
    pages = Pages(tokens=BLOCK, rows=lags + drafts, stride=stride, count=BLOCKS * stride)
    layer = make_paged_shift(monkeypatch, dtype, **OPTIONS[name])
    raw_rows = torch.full((pages.count, NUMBERS), torch.nan, dtype=dtype)  # not yet written
    assert layer.path == backend
    sequences: list[Sequence] = []
    steps_of_one_token = hits = rejected = 0
    for i in range(8):
        start = sequences[-1] if i % 3 == 1 else None
        sequences.append(Sequence(dtype, chance.randint(20, 40), list(range(1 + 5 * i, 6 + 5 * i)), start))
        for step in range(6):
            pieces = []
            for one in sequences:
                left = len(one.raw) - one.computed
                most = 1 if step % 2 else chance.choice([1, 1 + drafts, 7, 30])
                if left:
                    pieces.append((one, min(left, most)))
            if step == 0 and i % 3 == 2 and pieces[-1][0] is sequences[-1]:  # the batch computes its start
                twin = Sequence(dtype, 30, list(range(45, 50)), None)
                first, count = sequences[-1], min(len(sequences[-1].raw), 20)
                twin.raw[:16], twin.blocks[:2], twin.computed = first.raw[:16], first.blocks[:2], 16
                pieces[-1] = (first, count)
                pieces.append((twin, 3))
                hits += 1
            if not pieces:
                continue
            kv = torch.cat([one.raw[one.computed : one.computed + count] for one, count in pieces])
            wide = torch.cat([torch.randn(len(kv), 7).to(dtype), kv], dim=1)  # queries come first
            metadata = PagedShiftMetadata.from_batch(batch_of(pieces), pages, lags + 1)
            steps_of_one_token += all(count == 1 for _, count in pieces)
            written = torch.full_like(kv, torch.nan)
            layer.shift_batch(wide[:, 7:], written, raw_rows, metadata)
            for (one, count), shifted in zip(pieces, written.split([n for _, n in pieces]), strict=True):
                whole = expected(layer, one.raw)
                torch.testing.assert_close(shifted, whole[one.computed : one.computed + count])
                taken_back = chance.randint(0, count - 1) if count == 1 + drafts else 0
                rejected += taken_back
                one.raw[one.computed + count - taken_back :].normal_()  # other tokens replace the drafts
                one.computed += count - taken_back
    assert steps_of_one_token > 5
    assert hits > 0
    assert rejected > 0 or drafts == 0


def test_the_reference_which_knows_no_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_AUTO", "reference")
    with pytest.raises(ValueError, match='KVSHIFT_BACKEND must not be "reference"'):
        make_paged_shift(monkeypatch, torch.float32).path  # noqa: B018


def test_the_plugin_is_imported_where_graphs_may_be_broken() -> None:
    """vLLM then wraps the operator in a function of its own, in whose module annotations are looked up."""
    look = f"import {paged_shift.__name__} as it; print(it.kv_shift.__globals__['__name__'])"
    environment = {**os.environ, "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
    ended = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "vllm.compilation.breakable_cudagraph"
