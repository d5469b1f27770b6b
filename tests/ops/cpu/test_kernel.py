"""The compiled CPU kernel: it gives the bits of `shift_eager` with any number of threads, and may be unusable."""

from __future__ import annotations

import ctypes
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given

from kvshift.ops import shift_tokens
from kvshift.ops.boundaries import NO_ROW, ShiftPlan
from kvshift.ops.cpu import kernel as cpu_kernel
from kvshift.ops.torch_ops import shift_eager

from ...covering import covering
from ..cases import DTYPES, SUMS, assert_same_bits, outcome, random_case
from ..conftest import skip_unless_built
from ..strategies import cases

BUILT = Path(cpu_kernel.__file__).parent


@pytest.fixture(params=["AVX512", "AVX2"])
def kernel(request, monkeypatch) -> Iterator[None]:
    """Each build of the kernel that this machine can run; torch's kernels keep using the machine's full capability."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in (request.param, "AVX512"):
        pytest.skip(f"a machine with {capability}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    cpu_kernel._kernels.cache_clear()
    skip_unless_built("cpu")
    yield
    cpu_kernel._kernels.cache_clear()


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="built on Linux on x86-64 only")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_an_installation_with_a_compiler_has_the_kernel():
    assert cpu_kernel.cpu_unsupported_reason(torch.empty(0), 2) is None


@pytest.mark.slow
@given(case=cases())
def test_search_for_a_call_whose_bits_differ_from_eager(case):
    skip_unless_built("cpu")
    expected = outcome(case, "eager")
    assert_same_bits(outcome(case, "cpu"), expected, but=SUMS)


@covering(dtype=DTYPES, size=[1, 7, 8, 15, 16, 17, 31, 32, 33, 64, 80, 131], window=[2, 3, 5])
def test_every_remainder_of_a_vector(dtype, size, window, kernel):
    case = random_case(3, dtype=dtype, k_dim=size, v_dim=size + 1, window=window, rows=window - 1)
    expected = outcome(case, "eager")
    assert_same_bits(outcome(case, "cpu"), expected, but=SUMS)


@pytest.mark.parametrize(
    "shape", [{"batch": 3, "positions": 301}, {"lengths": [401, 1, 0, 439]}], ids=["sequences", "pack"]
)
def test_the_number_of_threads_changes_no_bit(shape, kernel):
    case = random_case(5, heads=5, k_dim=67, v_dim=61, rows=1, **shape)
    assert case.k.numel() > cpu_kernel._PARALLEL
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(outcome(case, "cpu", through_state=False))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same_bits(other, results[0])


@covering(dtype=DTYPES, size=[1, 7, 33, 64], window=[2, 3], positions=[1, 5, 700])
def test_a_pool_is_read_as_a_state_and_then_written(dtype, size, window, positions, kernel):
    """Tokens read pool rows that others overwrite; some tokens are not kept, and x and y have spare rows."""
    generator = torch.Generator().manual_seed(positions)
    heads, rows = 3, 40
    coefficients = torch.randn(heads, window, generator=generator)
    pool = torch.randn(rows, heads * size, generator=generator).to(dtype)
    x = torch.randn(positions + 2, heads * size + 3, generator=generator).to(dtype)[:, 3:]
    sources = torch.randint(-rows, positions, (1, positions, window), generator=generator, dtype=torch.int32)
    sources[0, :, 0] = torch.arange(positions)
    sources[0, ::3, 1] = NO_ROW
    kept = torch.full((positions,), -1, dtype=torch.int32)
    kept[-20:] = torch.randperm(rows, generator=generator)[: min(20, positions)].int()
    plan = ShiftPlan(sources, torch.empty(1, 0, dtype=torch.int32), None)
    x_TGD, pool_RGD = (part.view(1, -1, heads, size) for part in (x[:positions], pool))
    expected, expected_pool = shift_eager(x_TGD, coefficients, pool_RGD, plan), pool.clone()
    expected_pool[kept[kept >= 0].long()] = x[:positions][kept >= 0]
    y = torch.full((positions + 2, heads * size), torch.nan, dtype=dtype)
    cpu_kernel.Pool(coefficients, size, dtype).shift(x, y, pool.data_ptr(), rows, sources, kept)
    assert torch.equal(y[:positions], expected.view(positions, -1))
    assert y[positions:].isnan().all()
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_results_are_written_past_the_cache_with_the_same_bits(dtype, kernel):
    """From 2 MiB on, whole cache lines are stored past the cache; the mask gives sums of every number of terms."""
    positions = 2**21 // (2 * 5 * 192 * dtype.itemsize) + 1
    generator = torch.Generator().manual_seed(17)
    x, grad = (torch.randn(2, positions, 5, 192, generator=generator).to(dtype) for _ in range(2))
    state, coefficients = (
        torch.randn(2, 1, 5, 192, generator=generator).to(dtype),
        torch.randn(5, 2, generator=generator),
    )
    mask = torch.rand(2, positions, generator=generator) < 0.9
    assert x.nbytes >= 2**21 > x[:, 1:].nbytes
    results = {}
    for backend in ("cpu", "eager"):
        leaves = x.clone().requires_grad_(), state.clone().requires_grad_()
        y, _ = shift_tokens(leaves[0], coefficients, state=leaves[1], mask=mask, backend=backend)
        results[backend] = y, *torch.autograd.grad(y, leaves, grad)
    for name, result, expected in zip(("y", "x", "state"), results["cpu"], results["eager"], strict=True):
        assert torch.equal(result, expected), name


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FFF, 0xFFFF, 0x7F81, 0x7FC0, 0x0001, 0x8001, 0x7F7F], ids=hex)
def test_numbers_at_the_end_of_bfloat16(bits, kernel):
    """Infinities, NaN with any payload, subnormal numbers and the largest number round as in PyTorch."""
    signed = bits - 0x10000 if bits >= 0x8000 else bits
    x = torch.full((1, 2, 1, 33), signed, dtype=torch.int16).view(torch.bfloat16)
    for coefficients in ([1.0, 0.5], [1.0, 1.0], [-1.0, float("nan")]):
        y, expected = (
            shift_tokens(x, torch.tensor([coefficients]), backend=backend)[0] for backend in ("cpu", "eager")
        )
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def test_a_coefficient_may_be_a_nan_with_any_payload(kernel):
    coefficients = torch.tensor([[0x7FFFFFFF, 0x3F800000]], dtype=torch.int32).view(torch.float32)
    y, _ = shift_tokens(torch.ones(1, 3, 1, 5, dtype=torch.bfloat16), coefficients, backend="cpu")
    assert y.isnan().all()


def test_auto_takes_the_kernel(kernel, monkeypatch):
    calls = []
    real = cpu_kernel.shift_cpu
    monkeypatch.setattr("kvshift.ops.shift.shift_cpu", lambda *args: calls.append(1) or real(*args))
    case = random_case(7)
    case.call("auto")
    assert len(calls) == 2


@pytest.fixture
def elsewhere(monkeypatch, tmp_path) -> Iterator[Path]:
    """An empty folder in which the builds of the kernel are looked for."""
    monkeypatch.setattr(cpu_kernel, "__file__", str(tmp_path / "kernel.py"))
    cpu_kernel._kernels.cache_clear()
    yield tmp_path
    cpu_kernel._kernels.cache_clear()


def test_auto_does_without_the_kernel_where_none_is_built(elsewhere):
    case = random_case(9, rows=1)
    assert_same_bits(outcome(case, "auto"), outcome(case, "eager"))
    with pytest.raises(ValueError, match=r"_kernel\.\S+\.so was not built when kvshift was installed"):
        case.call("cpu")


def test_a_kernel_that_does_not_load_is_named(elsewhere):
    for build in ("x86-64-v3", "x86-64-v4", "DEFAULT"):
        (elsewhere / f"_kernel.{build}.so").write_bytes(b"not a library")
    with pytest.raises(ValueError, match=r"_kernel\.\S+\.so cannot be loaded: "):
        random_case(9).call("cpu")


def test_a_kernel_that_was_built_from_other_sources_is_not_called(elsewhere):
    """As after an update of an editable installation: a call could read past a struct that has grown."""
    for path in (*BUILT.glob("*.cpp"), *BUILT.glob("*.h"), *BUILT.glob("*.so")):
        shutil.copy(path, elsewhere)
    built = [ctypes.c_uint32.in_dll(ctypes.CDLL(str(path)), "kvshift_sources").value for path in BUILT.glob("*.so")]
    if not any(built):
        pytest.skip("not built by an installation")
    with (elsewhere / "next_token.h").open("a") as file:
        file.write("// changed")
    case = random_case(9, rows=1)
    with pytest.warns(
        UserWarning, match="the CPU kernel is not used: .* was built from other sources, .* install kvshift"
    ):
        found = outcome(case, "auto")
    assert_same_bits(found, outcome(case, "eager"))
    with pytest.raises(ValueError, match=r"_kernel\.\S+\.so was built from other sources"):
        case.call("cpu")
