"""The operator's edge suite finds no fault in the backends that run here."""

from __future__ import annotations

import pytest
import torch

from kvshift_lab.doctor.edge_suite import EDGES, FAULTS
from kvshift_lab.doctor.small_calls import Kind, difference, outcome
from tests.ops.conftest import skip_unless_built


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_edge_is_right(backend, dtype):
    skip_unless_built(backend)
    kind = Kind(torch.device("cpu"), dtype, 20, 19, 3)
    for edge in EDGES.values():
        exact = outcome(edge, kind, "reference", exact=True)
        assert difference(outcome(edge, kind, backend), exact, dtype) is None
    assert [fault(kind, backend) for fault in FAULTS.values()] == [None, None]
