"""Negative controls: mutants of the Triton kernels, each with the check that detects it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshift.ops.triton import launch as triton_launch
from kvshift.ops.triton.launch import Tiling

from .. import checks
from ..cases import Case, random_case
from ..conftest import skip_unless_built
from ..fused_cases import random_fused
from ..fused_rounding import assert_within_rounding
from ..mutants import ROOT, Mutant
from ..rounding import assert_within_one_rounding

pytestmark = pytest.mark.slow

HOLES = [[0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]]
DOCUMENTS = [[0, 0, 1, 1, 1, 1], [7, -1, -1, -1, -1, 7]]


# Checks

Check = Callable[[], Any]


def parity(case: Case, *, through_state: bool = True) -> Check:
    return partial(assert_within_one_rounding, case, "triton", through_state=through_state)


check_rows = parity(random_case(2, 1, 6, rows=4, window=3))
check_sums = parity(random_case(3, 1, 7), through_state=False)
check_rounding = parity(random_case(5, 1, 40, window=3, dtype=torch.bfloat16), through_state=False)
check_three_sequences = parity(random_case(37, 3, 2, rows=1))
check_documents = parity(random_case(11, 2, 6, seq_idx=DOCUMENTS, window=3, rows=2))
check_aligned_heads = parity(random_case(43, 2, 5, k_dim=8, v_dim=16), through_state=False)
check_padding = partial(checks.check_padding_is_as_if_absent, "triton", HOLES, 1, -29.0)
check_padding_of_nan = partial(checks.check_padding_is_as_if_absent, "triton", HOLES, 1, torch.nan)
check_rotation = partial(assert_within_rounding, random_fused(13, 2, 3, tables=2, norm=False))
check_norm = partial(assert_within_rounding, random_fused(17, 1, 3))
check_norm_of_a_wide_window = partial(assert_within_rounding, random_fused(19, 1, 5, window=3))


def check_pack() -> None:
    case = random_case(7, lengths=[2, 0, 1, 3], rows=2)
    checks.check_pack_is_its_sequences(case, "triton", [2, 0, 1, 3])


@torch.no_grad()
def check_next_state() -> None:
    """Without gradients, the launch writes the next state."""
    for case in (
        random_case(41, 3, 2, rows=4, window=3),
        random_case(59, 2, 6, rows=1),
        random_case(43, lengths=[2, 0, 1, 3], rows=2),
        random_case(47, 2, 6, mask=HOLES, rows=1),
        random_case(53, 2, 6, seq_idx=DOCUMENTS, rows=3),
    ):
        assert case.call("triton")[2] == case.call("reference")[2]


# Mutants


FORWARD, BACKWARD = KERNELS = "triton/forward.py", "triton/backward.py"
PLAIN = "torch_ops.py"


@dataclass(frozen=True)
class KernelMutant(Mutant):
    """A change to one of the kernels' files or to another module of the operator, and the check that detects it."""

    check: Check

    @contextmanager
    def in_place(self, folder: Path) -> Iterator[None]:
        """Launch the changed kernels in place of the real ones within the context."""
        if self.file not in KERNELS:
            with super().in_place(folder):
                yield
            return
        for file in KERNELS:
            text = self.source() if file == self.file else (ROOT / file).read_text()
            text = text.replace("from kvshift.ops.triton.forward", "from mutant_forward")
            (folder / f"mutant_{Path(file).name}").write_text(text)
        imported = "from kvshift.ops.triton import backward, forward"
        copies = "import mutant_backward as backward, mutant_forward as forward"
        sys.path.insert(0, str(folder))
        try:
            with Mutant("triton/launch.py", imported, copies).in_place(folder):
                yield
        finally:
            sys.path.remove(str(folder))
            for name in ("mutant_forward", "mutant_backward"):
                sys.modules.pop(name, None)


SOURCE = "row - lag if sources is None else tl.load(sources + row.to(tl.int64) * W + lag, mask=there, other=NO_ROW)"
READER = "t + lag if readers is None else tl.load(readers + t.to(tl.int64) * W + lag, mask=there, other=NO_ROW)"
ADD = "            total = _add(total, term, tl.load(weights + lag).to(ACC))\n"
MUTANTS = {
    "lags swapped": KernelMutant(FORWARD, ADD, ADD.replace("weights + lag", "weights + W - lag"), check_rows),
    "state off by one": KernelMutant(
        FORWARD,
        "_load_rows(state, state_stride, source + Q, of_state",
        "_load_rows(state, state_stride, source + Q - 1, of_state",
        check_rows,
    ),
    "state of the first sequence": KernelMutant(
        FORWARD, "state += (b * Q * heads + head) * D", "state += head * D", check_three_sequences
    ),
    "rounded twice": KernelMutant(
        FORWARD, ADD, ADD.replace(".to(ACC))", ".to(ACC)).to(x.dtype.element_ty).to(ACC)"), check_rounding
    ),
    "boundaries ignored": KernelMutant(FORWARD, SOURCE, "row - lag", check_pack),
    "sources of the first row of the batch": KernelMutant(
        FORWARD, "sources += b * T * W", "sources += b * 0", check_documents
    ),
    "state read where there is nothing": KernelMutant(
        FORWARD,
        "before = _load_rows(state, state_stride, source + Q, of_state",
        "of_state = source < 0\n        before = _load_rows(state, state_stride, tl.maximum(source + Q, 0), of_state",
        check_documents,
    ),
    "padding written": KernelMutant(
        FORWARD,
        "now = row if weights is None else _source(sources, row, there, 0, W)",
        "now = row",
        check_padding,
    ),
    "strides of other units": KernelMutant(
        FORWARD,
        "(b * stride_b + tl.cast(head, tl.int64) * stride_g) * ALIGN",
        "b * stride_b + tl.cast(head, tl.int64) * stride_g",
        check_aligned_heads,
    ),
    "next state in wrong order": KernelMutant(FORWARD, "n + (T - N)", "T - 1 - n", check_next_state),
    "next state read past the end": KernelMutant(
        FORWARD, "tl.where(there, n + (T - N), NO_ROW)", "n + (T - N)", check_next_state
    ),
    "next state of the first row of the batch": KernelMutant(
        FORWARD, "next_state += b * N", "next_state += b * 0", check_next_state
    ),
    "next state of every fourth row": KernelMutant(
        FORWARD, "for first in range(0, N, BLOCK_T):", "for first in range(0, 1):", check_next_state
    ),
    "mean over half a head": KernelMutant(
        FORWARD, "tl.sum(high * high, 1)) / D + EPS)", "tl.sum(high * high, 1)) / (D // 2) + EPS)", check_norm
    ),
    "tables of the first row of the batch": KernelMutant(
        FORWARD,
        "        cos += b * table_b * ALIGN_TABLE\n        sin += b * table_b * ALIGN_TABLE\n",
        "        cos += b * 0\n        sin += b * 0\n",
        check_rotation,
    ),
    "rotation the other way": KernelMutant(FORWARD, "low * c - high * s)", "low * c + high * s)", check_rotation),
    "gradient from the last token again": KernelMutant(
        BACKWARD, "tl.where(reader < T, reader, NO_ROW)", "tl.minimum(reader, T - 1)", check_sums
    ),
    "gradient across documents": KernelMutant(BACKWARD, READER, "t + lag", check_pack),
    "readers of the first row of the batch": KernelMutant(
        BACKWARD, "readers += (b * (Q + T) + Q) * W", "readers += (b * 0 + Q) * W", check_documents
    ),
    "readers of the state": KernelMutant(
        BACKWARD, "readers += (b * (Q + T) + Q) * W", "readers += b * (Q + T) * W", check_pack
    ),
    "padding in the sums": KernelMutant(
        BACKWARD,
        "    real = _reader(readers, t, there, 0, T, W) >= 0\n    here",
        "    real = there\n    here",
        check_padding_of_nan,
    ),
    "sums of one tile lost": KernelMutant(
        BACKWARD,
        "tl.store(partials + lag, tl.sum(tl.sum(here * g, 1), 0))",
        "tl.store(partials + lag, tl.sum(tl.sum(tl.where((t < 4)[:, None], here * g, 0.0), 1), 0))",
        check_sums,
    ),
    "gradient rotated the other way": KernelMutant(
        BACKWARD, "low = g_low * c + g_high * s", "low = g_low * c - g_high * s", check_rotation
    ),
    "norm's gradient without its mean": KernelMutant(
        BACKWARD, "low = inverse * (low - x_low * along)", "low = inverse * low", check_norm
    ),
    "norm's gradient of the raw keys": KernelMutant(
        BACKWARD,
        "_shifted(x, x_t, (column + half) * x_d, None, 0, d, in_half, weights,",
        "_shifted(x, x_t, (column + half) * x_d, None, 0, d, in_half, None,",
        check_norm_of_a_wide_window,
    ),
    "gain's gradient of the last head": KernelMutant(
        BACKWARD,
        "            low += s_low\n            high += s_high\n",
        "            low = s_low\n            high = s_high\n",
        check_norm,
    ),
    "lag of a later token given to the state": KernelMutant(
        PLAIN, "torch.where(w == 0, 0, g * w)", "torch.where(w == 0, 0, g * weights[-1])", check_rows
    ),
    "the state's share of the sums lost": KernelMutant(
        PLAIN, "torch.where(is_read, state_BQGD, 0)", "0 * state_BQGD", check_rows
    ),
}


@pytest.fixture(autouse=True)
def two_tiles(monkeypatch) -> None:
    skip_unless_built("triton")
    for name in triton_launch.TILING:
        monkeypatch.setitem(triton_launch.TILING, name, Tiling(positions=4, heads=4))


@functools.cache
def assert_sound(check: Check) -> None:
    """Check the unchanged kernels, once for all mutants."""
    check()


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_caught(mutant: KernelMutant, tmp_path):
    assert_sound(mutant.check)
    with mutant.in_place(tmp_path), pytest.raises(AssertionError):
        mutant.check()


def test_the_copies_that_are_not_changed_pass(tmp_path):
    """The checks detect changed text, not that the kernels are copies."""
    same = '"""The operator on a GPU'
    with KernelMutant(FORWARD, same, same, check_rows).in_place(tmp_path):
        for check in {mutant.check for mutant in MUTANTS.values()}:
            check()
