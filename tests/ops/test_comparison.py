"""The comparison that `python -m kvshift --test` makes notices faults of the Triton kernels, interpreted here."""

from __future__ import annotations

import pytest
import torch

from kvshift.ops import comparison

from .conftest import skip_unless_built
from .triton.test_mutants import MUTANTS

CPU = torch.device("cpu")
UNSEEN = {"rounded twice", "next state of every fourth row"}  # differ by rounding; with more sequences


def lines(device: torch.device, monkeypatch: pytest.MonkeyPatch, *dtypes: torch.dtype) -> list[str]:
    monkeypatch.setattr(comparison, "_DTYPES", dtypes)
    found = []
    try:
        found += comparison.compare_backends(device)
    except AssertionError as error:
        found.append(str(error))
    return [line for line in found if line.startswith("triton")]


@pytest.mark.interpreted
def test_the_kernels_are_right(monkeypatch):
    skip_unless_built("triton")
    assert lines(CPU, monkeypatch, torch.bfloat16) == ["triton on cpu, bfloat16: right"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MUTANTS.keys() - UNSEEN))
def test_a_mutant_is_noticed(name, monkeypatch, tmp_path):
    skip_unless_built("triton")
    with MUTANTS[name].in_place(tmp_path):
        (line,) = lines(CPU, monkeypatch, torch.float32)
    assert not line.endswith(": right")
