"""Peak memory and bytes saved for backward equal sums computed by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvshift.ops.dispatch import needs_traceable_ops

from .scripts import FOLDER, script

bytes_saved, peak_bytes = script("allocated").bytes_saved, script("allocated").peak_bytes

CPU = torch.device("cpu")
SIZE = 1000 * 4  # bytes of x


def test_what_is_held_at_once_counts_and_what_was_there_before_does_not():
    x = torch.ones(1000)

    def run():
        y = x + x
        z = y + x  # y and z are alive
        del y
        return z + x  # z and the result are alive

    assert peak_bytes(run, CPU) == 2 * SIZE


def test_what_backward_takes_counts():
    x = torch.ones(1000, requires_grad=True)
    x.grad = torch.zeros(1000)

    def run():
        y = x.exp()  # kept until the end
        y.backward(x.detach())  # one more: the gradient, before it is added to x.grad

    assert peak_bytes(run, CPU) == 2 * SIZE


def test_memory_that_was_there_before_counts_as_held_all_the_time():
    held = [torch.ones(5000)]

    def run():
        held.clear()
        return torch.ones(1000)

    assert peak_bytes(run, CPU) == SIZE
    assert peak_bytes(lambda: None, CPU) == 0


def test_compiled_code_is_seen():
    x = torch.ones(1000)

    @torch.compile(backend="aot_eager")
    def run():
        return (x + x, x * x, x.exp())

    run()
    assert peak_bytes(run, CPU) == 3 * SIZE


def test_an_error_ends_the_count():
    def run():
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        peak_bytes(run, CPU)
    assert peak_bytes(lambda: torch.ones(1000), CPU) == SIZE


@pytest.mark.slow
def test_the_profiler_prints_nothing():
    code = "import allocated, torch; print(allocated.peak_bytes(lambda: torch.ones(1000), torch.device('cpu')))"
    run = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "4000"
    assert run.stderr == ""


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
