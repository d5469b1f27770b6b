"""Negative controls: ways to get the Triton kernels wrong, and for each a named check that notices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvshift.ops.triton import launch as triton_launch
from kvshift.ops.triton.launch import Tiling

from . import checks
from .cases import random_case
from .conftest import skip_unless_built
from .fused_cases import random_fused
from .fused_rounding import assert_within_rounding
from .mutants import ROOT, Mutant
from .rounding import assert_within_one_rounding

pytestmark = pytest.mark.slow

FILES = ("forward", "backward")  # later ones import from the first
HOLES = [[0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]]
DOCUMENTS = [[0, 0, 1, 1, 1, 1], [7, -1, -1, -1, -1, 7]]


# Checks


def check_rows() -> None:
    assert_within_one_rounding(random_case(2, 1, 6, rows=4, window=3), "triton", through_state=True)


def check_sums() -> None:
    assert_within_one_rounding(random_case(3, 1, 7), "triton", through_state=False)


def check_rounding() -> None:
    case = random_case(5, 1, 40, window=3, dtype=torch.bfloat16)
    assert_within_one_rounding(case, "triton", through_state=False)


def check_pack() -> None:
    case = random_case(7, lengths=[2, 0, 1, 3], rows=2)
    checks.check_pack_is_its_sequences(case, "triton", [2, 0, 1, 3])


def check_three_sequences() -> None:
    assert_within_one_rounding(random_case(37, 3, 2, rows=1), "triton", through_state=True)


def check_documents() -> None:
    case = random_case(11, 2, 6, seq_idx=DOCUMENTS, window=3, rows=2)
    assert_within_one_rounding(case, "triton", through_state=True)


def check_padding() -> None:
    checks.check_padding_is_as_if_absent("triton", HOLES, 1, -29.0)


def check_padding_backward() -> None:
    assert_within_one_rounding(random_case(31, 2, 6, mask=HOLES), "triton", through_state=False)


def check_rotation() -> None:
    assert_within_rounding(random_fused(13, 2, 3, tables=2, norm=False))


def check_norm() -> None:
    assert_within_rounding(random_fused(17, 1, 3))


def check_norm_of_a_wide_window() -> None:
    assert_within_rounding(random_fused(19, 1, 5, window=3))


def check_rotated_documents() -> None:
    assert_within_rounding(random_fused(23, 1, 6, queries=None, seq_idx=DOCUMENTS[:1]))


def check_rotated_padding() -> None:
    assert_within_rounding(random_fused(29, 1, 6, queries=None, mask=HOLES[:1]))


# Mutants


@dataclass(frozen=True)
class KernelMutant:
    """The files of the kernels with one text in place of another."""

    file: str
    right: str
    wrong: str
    check: Callable[[], None]

    @contextmanager
    def in_place(self, folder: Path) -> Iterator[None]:
        """While it lasts, these are launched in place of the real ones."""
        texts = {file: (ROOT / "triton" / f"{file}.py").read_text() for file in FILES}
        texts[self.file] = Mutant(f"triton/{self.file}.py", self.right, self.wrong).source()
        for file, text in texts.items():
            (folder / f"mutant_{file}.py").write_text(
                text.replace("from kvshift.ops.triton.forward", "from mutant_forward")
            )
        imported = "from kvshift.ops.triton import backward, forward"
        copies = "import mutant_backward as backward, mutant_forward as forward"
        sys.path.insert(0, str(folder))
        try:
            with Mutant("triton/launch.py", imported, copies).in_place(folder):
                yield
        finally:
            sys.path.remove(str(folder))
            for file in FILES:
                sys.modules.pop(f"mutant_{file}", None)


KERNELS, BACKWARD = FILES
MUTANTS = {
    "links from a position to itself": KernelMutant(
        KERNELS,
        "tl.store(out + (at + here + 1) * 2, found, mask=here + 1 < T)",
        "tl.store(out + (at + here) * 2, found, mask=here < T)",
        check_padding,
    ),
    "links to padding behind": KernelMutant(
        KERNELS,
        "found = tl.where(tl.load(mask + at + here, mask=here < T, other=0) != 0, here, T)",
        "found = tl.where(here < T, here, T)",
        check_padding_backward,
    ),
    "lags swapped": KernelMutant(
        KERNELS,
        "_add(total, term, tl.load(weights + lag).to(ACC))",
        "_add(total, term, tl.load(weights + W - lag).to(ACC))",
        check_rows,
    ),
    "state off by one": KernelMutant(
        KERNELS,
        "_load_rows(state, state_stride, newest - depth, of_state, state_column, in_head, ACC)",
        "_load_rows(state, state_stride, newest - depth - 1, of_state, state_column, in_head, ACC)",
        check_rows,
    ),
    "state of the neighbour": KernelMutant(
        KERNELS,
        "    newest = (sequence + 1) * R\n    k_real = real",
        "    newest = tl.maximum(sequence, 1) * R\n    k_real = real",
        check_pack,
    ),
    "rounded twice": KernelMutant(
        KERNELS,
        "            total = _add(total, term, tl.load(weights + lag).to(ACC))\n",
        "            total = _add(total, term, tl.load(weights + lag).to(ACC)).to(x.dtype.element_ty).to(ACC)\n",
        check_rounding,
    ),
    "empty sequences not passed over": KernelMutant(
        KERNELS,
        "tl.load(cu_seqlens + middle + 1) <= t",
        "tl.load(cu_seqlens + middle + 1) < t",
        check_pack,
    ),
    "numbers of documents ignored": KernelMutant(
        KERNELS,
        "        alive = alive & (same | (stays == 0))\n        stays = stays & same\n",
        "",
        check_documents,
    ),
    "state read behind a document boundary": KernelMutant(
        KERNELS,
        "        alive = alive & (same | (stays == 0))\n",
        "",
        check_documents,
    ),
    "holes stepped into": KernelMutant(
        KERNELS,
        "        before = tl.load(links + (at + row) * 2, mask=inside, other=-1)\n",
        "        before = row - 1\n",
        check_padding,
    ),
    "padding written": KernelMutant(
        KERNELS,
        "        inside = tl.load(mask + b * T + t, mask=inside, other=0) != 0\n",
        "        inside = inside\n",
        check_padding,
    ),
    "state from the padded end": KernelMutant(
        KERNELS,
        "        row = tl.where(real, row, tl.load(links + (b * T + row) * 2, mask=has_any, other=-1))\n",
        "",
        check_padding,
    ),
    "state in wrong order": KernelMutant(
        KERNELS,
        "at = (sequence + 1) * N - 1 - i",
        "at = sequence * N + i",
        check_rows,
    ),
    "mean over half a head": KernelMutant(
        KERNELS,
        "tl.sum(high * high, 1)) / D + EPS)",
        "tl.sum(high * high, 1)) / (D // 2) + EPS)",
        check_norm,
    ),
    "tables of the first row": KernelMutant(
        KERNELS,
        "at = b * table_b + row.to(tl.int64)[:, None] * table_t",
        "at = row.to(tl.int64)[:, None] * table_t",
        check_rotation,
    ),
    "rotation the other way": KernelMutant(
        KERNELS,
        "low * c - high * s)",
        "low * c + high * s)",
        check_rotation,
    ),
    "walk forward across the end": KernelMutant(
        BACKWARD,
        "stays = inside & (after < end)",
        "stays = inside & (after < T)",
        check_pack,
    ),
    "walk forward across documents": KernelMutant(
        BACKWARD,
        "        stays = stays & same\n",
        "",
        check_rotated_documents,
    ),
    "walk forward into holes": KernelMutant(
        BACKWARD,
        "        after = tl.load(links + (at + row) * 2 + 1, mask=inside, other=0)\n",
        "        after = row + 1\n",
        check_rotated_padding,
    ),
    "sums of one tile lost": KernelMutant(
        BACKWARD,
        "tl.store(partials + head * W + lag, tl.sum(tl.sum(here * g, 1), 0))",
        "tl.store(partials + head * W + lag, tl.sum(tl.sum(tl.where((t < 4)[:, None], here * g, 0.0), 1), 0))",
        check_sums,
    ),
    "gradient rotated the other way": KernelMutant(
        BACKWARD,
        "low = g_low * c + g_high * s",
        "low = g_low * c - g_high * s",
        check_rotation,
    ),
    "norm's gradient without its mean": KernelMutant(
        BACKWARD,
        "low = inverse * (low - x_low * along)",
        "low = inverse * low",
        check_norm,
    ),
    "norm's gradient of the raw keys": KernelMutant(
        BACKWARD,
        "        x_high = _shifted(\n            x, x_t, column + (b * 0 + half) * x_d, None, 0, d, in_half, weights,",
        "        x_high = _shifted(\n            x, x_t, column + (b * 0 + half) * x_d, None, 0, d, in_half, None,",
        check_norm_of_a_wide_window,
    ),
    "gain's gradient of the last head": KernelMutant(
        BACKWARD,
        "                low += s_low\n                high += s_high\n            if q_scale is not None:",
        "                low = s_low\n                high = s_high\n            if q_scale is not None:",
        check_norm,
    ),
    "lag of a later token given to the state": KernelMutant(
        BACKWARD,
        "inside & (lag >= back), d.to(tl.int64) * y_d",
        "inside & (lag > 0), d.to(tl.int64) * y_d",
        check_rows,
    ),
    "sums of the last sequence added twice": KernelMutant(
        BACKWARD,
        "    there = sequence < sequences\n",
        "    there = sequence >= 0\n",
        check_three_sequences,
    ),
}


@pytest.fixture(autouse=True)
def two_tiles(monkeypatch) -> None:
    skip_unless_built("triton")
    for name in triton_launch.TILING:
        monkeypatch.setitem(triton_launch.TILING, name, Tiling(positions=4, heads=4))


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_caught(mutant: KernelMutant, tmp_path):
    mutant.check()
    with mutant.in_place(tmp_path), pytest.raises(AssertionError):
        mutant.check()


def test_the_copies_that_are_not_changed_pass(tmp_path):
    """It is the changed text that is caught, not that the kernels are copies."""
    same = '"""The operator on a GPU'
    with KernelMutant(KERNELS, same, same, check_rows).in_place(tmp_path):
        for check in {mutant.check for mutant in MUTANTS.values()}:
            check()
