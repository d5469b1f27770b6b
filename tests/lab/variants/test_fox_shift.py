"""The data-dependent shift of FoX, with a slow loop of its formula for `test_mixing.py`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvshift.lab.variants.fox_shift import FoXShift

from .layouts import HEADS, before, heads


def made() -> FoXShift:
    torch.manual_seed(0)
    return FoXShift(HEADS)


def by_loop(shift: FoXShift, which: str, x: Tensor, rows: list[list[int | None]], hidden: Tensor) -> Tensor:
    """Compute in double precision, head by head."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for b, row in enumerate(rows):
        for t in range(len(row)):
            s = before(row, t)
            for head, w in enumerate((shift.key_gate if which == "k" else shift.value_gate).double()):
                a = 1 / (1 + math.exp(-(w @ hidden[b, t].double()).item()))
                y[b, t, head] = (1 - a) * x[b, t, head].double()
                if s is not None:
                    y[b, t, head] += a * x[b, s, head].double()
    return y


def test_it_says_who_has_to_call_it() -> None:
    shift, (k, v) = made(), heads()
    with shift.reading(torch.randn(5, 7, HEADS.width)):
        shift.mix(k, v, None, mask=None, seq_idx=None)
    with pytest.raises(RuntimeError, match="call it within `reading`"):
        shift.mix(k, v, None, mask=None, seq_idx=None)
