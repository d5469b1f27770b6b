"""The peak memory of a call equals sums computed by hand."""

from __future__ import annotations

import pytest
import torch

from kvshift_lab.benchmarks.peak import peak_bytes

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
