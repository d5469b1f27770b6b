"""The bytes saved for backward equal sums computed by hand."""

from __future__ import annotations

import pytest
import torch

from kvshift.ops.dispatch import needs_traceable_ops
from kvshift_lab.benchmarks.activation_memory import bytes_saved
from kvshift_lab.benchmarks.peak import peak_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "compiled", [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.slow)]
)
def test_what_is_kept_is_counted_once_and_results_and_leaves_are_not(compiled):
    x = torch.ones(7, 11, requires_grad=True)

    def run():
        y = x.exp()  # keeps y: 308 bytes
        return (y * y[:3].sum()) + y.sin()  # saves y again, a scalar, and y again

    call = torch.compile(run, backend="aot_eager") if compiled else run
    call()
    assert bytes_saved(call, CPU) == 7 * 11 * 4 + 4


def test_what_is_gone_when_the_pass_is_over_is_not_kept():
    x = torch.ones(5, 13, requires_grad=True)
    assert bytes_saved(lambda: (x + 1).neg() + 2, CPU) == 0
    with torch.no_grad():
        assert bytes_saved(lambda: x.exp().exp(), CPU) == 0


def test_what_is_computed_again_is_not_kept():
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(5, 13, requires_grad=True)

    def run():
        return checkpoint(lambda x: x.exp().sin().exp(), x, use_reentrant=False, preserve_rng_state=False)

    assert bytes_saved(run, CPU) < 5 * 13 * 4
    assert bytes_saved(lambda: x.exp().sin().exp(), CPU) >= 5 * 13 * 4


def test_the_path_that_is_counted_is_that_of_a_user():
    """Counting must not make the shift take its traceable operations, which save more."""
    seen = []

    def run():
        seen.append(needs_traceable_ops())
        return torch.ones(3)

    assert bytes_saved(run, CPU) == 0
    assert peak_bytes(run, CPU) == 12
    assert seen == [False, False]
