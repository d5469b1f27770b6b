"""The search for launch parameters, with a benchmark that returns prescribed times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvshift.ops.triton.call import triton_unsupported_reason
from kvshift.ops.triton.launch import TILING, Tiling

from .scripts import script

tilings = script("tilings")


@pytest.mark.parametrize("kernel", TILING)
def test_the_fastest_tiling_comes_first_and_nothing_stays_changed(kernel, monkeypatch, capsys):
    if triton_unsupported_reason(torch.empty(0), 2) is not None:
        pytest.skip("no Triton")
    before = dict(TILING)
    tried = [TILING[kernel], Tiling(warps=8), Tiling(warps=2)]
    monkeypatch.setattr(tilings, "candidates", lambda name: tried if name == kernel else [])

    def told(run: Callable[[], object], **_: object) -> float:
        """Return a time that is shortest for two warps; raise an error for eight."""
        if TILING[kernel].warps == 8:
            raise RuntimeError("out of registers")
        return float(TILING[kernel].warps)

    monkeypatch.setattr("triton.testing.do_bench", told)
    found = tilings.tune(torch.device("cpu"), shapes=((1, 5, 3, 3, 4),))
    assert [row["warps"] for row in found[kernel]] == [2, TILING[kernel].warps, 8]
    assert [row["behind"] for row in found[kernel]][:2] == [1.0, TILING[kernel].warps / 2]
    assert found[kernel][2]["seconds"] == [None]
    assert "out of registers" in capsys.readouterr().out
    assert before == TILING


@pytest.mark.parametrize("kernel", TILING)
def test_the_present_tiling_is_tried_first_and_none_twice(kernel):
    tried = list(tilings.candidates(kernel))
    assert tried[0] == TILING[kernel]
    assert len(set(tried)) == len(tried) > 5
