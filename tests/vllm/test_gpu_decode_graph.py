"""Decoding steps in real CUDA graphs: `test_decode_graph.py` with a GPU instead of the interpreter."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.integrations.vllm_plugin.paged_shift import PagedShiftMetadata, kv_shift

from ..ops.device import DEVICE, MARKS, needs_cuda
from .paged_sequences import Sequence, batch_of, make_paged_shift
from .test_decode_graph import SETTINGS, WRONG, Decoding, assert_replays_are_right, kernel

pytestmark = [*MARKS, needs_cuda]


def there(batch: Any) -> Any:
    """Return a batch with its tensors on the device, except the one that vLLM also keeps on the host."""
    moved = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in vars(batch).items()}
    return SimpleNamespace(**moved | {"query_start_loc_cpu": batch.query_start_loc_cpu})


class RealGraph:
    """A CUDA graph with the interface of `CapturedGraph`."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def recording(self, kernel: Any) -> Any:
        return kernel

    def capture(self) -> AbstractContextManager:
        return torch.cuda.graph(self.graph)

    def replay(self) -> None:
        self.graph.replay()


class DecodingOnDevice(Decoding):
    """`Decoding` with its pages and its graph on the device, where prompts are also written."""

    device = DEVICE
    make_graph = RealGraph

    def warm_up(self) -> None:
        kv_shift(self.kv, self.shifted, "shift")
        torch.cuda.synchronize()

    def kept(self) -> Tensor:
        """Return the memory of the pages, with expected values in vLLM's null block: prompts may write there."""
        kept, null = self.whole.cpu(), slice(self.pages.stride, 2 * self.pages.stride)
        kept[null] = self.expected_whole[null]
        return kept

    def shift(self, pieces: list[tuple[Sequence, int]], kv: Tensor, cache: Tensor) -> Tensor:
        if cache is self.expected_cache:
            return super().shift(pieces, kv, cache)
        metadata = PagedShiftMetadata.from_batch(there(batch_of(pieces)), self.pages, self.layer.options.window)
        written = torch.full_like(kv, torch.nan, device=DEVICE)
        self.served.shift_batch(kv.to(DEVICE), written, cache, metadata)
        return written.cpu()


@SETTINGS
def test_a_graph_holds_for_other_batches(
    window: int, drafts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_replays_are_right(DecodingOnDevice(monkeypatch, window, drafts, dtype))


@pytest.mark.parametrize("name", ["the pack is not looked at", "another row of the ring"])
def test_a_wrong_kernel_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = DecodingOnDevice(monkeypatch, window=3, drafts=2, launched=kernel(*WRONG[name], folder=tmp_path))
    with pytest.raises(AssertionError, match="step"):
        assert_replays_are_right(decoding)


def test_the_kernel_passes_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for window in (2, 5):
        layer = make_paged_shift(monkeypatch, torch.bfloat16, window=window).to(DEVICE)
        assert layer.path == "triton"
        assert layer.supports_uniform
