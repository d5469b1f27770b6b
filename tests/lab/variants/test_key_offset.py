"""The partial key offset: a slow loop of its formula for `test_mixing.py`, and a view of keys."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvshift.lab.variants.key_offset import KeyOffset, offset_keys

from .layouts import HEADS, LAYOUTS, before

FORMS = {"half": partial(KeyOffset, HEADS), "whole": partial(KeyOffset, HEADS, whole=True)}


def by_loop(mixer: KeyOffset, which: str, x: Tensor, rows: list[list[int | None]], _: Tensor) -> Tensor:
    y, quarter = x.double().clone(), x.shape[-1] // 4
    slow = range(4 * quarter) if mixer.whole else [*range(quarter, 2 * quarter), *range(3 * quarter, 4 * quarter)]
    for b, row in enumerate(rows):
        for t in range(len(row)):
            s = before(row, t)
            for d in slow if s is not None and which == "k" else []:
                y[b, t, :, d] = x[b, s, :, d]
    return y


def test_of_a_view_whose_base_stays() -> None:
    base = torch.randn(5, 7, 2 * HEADS.kv_heads * HEADS.size, generator=torch.Generator().manual_seed(2))
    kept = base.clone()
    view = base[..., HEADS.kv_heads * HEADS.size :].view(5, 7, HEADS.kv_heads, HEADS.size)
    expected = by_loop(FORMS["half"](), "k", view, LAYOUTS["whole"], base)
    assert torch.equal(offset_keys(view)[0].double(), expected)
    assert torch.equal(base, kept)
