"""The kernel of the next token has the bits of separate operations, writes nothing else, and refuses by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from kvshift.ops.cpu import kernel as cpu_kernel
from kvshift.ops.cpu.next_token import NextToken, TokenTables, next_token_dtypes, sums_like_torch
from kvshift.ops.state import ShiftState

from ...covering import covering
from ..conftest import skip_unless_built
from ..next_token_cases import Case, by_kernel, by_operations, check, inputs, prepared

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["AVX512", "AVX2"], autouse=True)
def kernel(request, monkeypatch) -> Iterator[None]:
    """Each build of the kernel that this machine can run; torch's kernels keep using the machine's full capability."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in (request.param, "AVX512"):
        pytest.skip(f"a machine with {capability}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    _forget()
    skip_unless_built("cpu")
    yield
    _forget()


def _forget() -> None:
    cpu_kernel._kernels.cache_clear()
    sums_like_torch.cache_clear()


@covering(
    dtype=DTYPES,
    size=[2, 8, 10, 14, 20, 32, 36, 64, 80, 128, 256],
    v_size=[1, 7, 16],
    shape=[(1, 4, 4), (3, 6, 2)],
    norm=[False, True],
    targets=["kv", "k", "v", ""],
    zeros=[False, True],
    counted=[False, True],
)
def test_bits(dtype, size, v_size, shape, norm, targets, zeros, counted):
    batch, heads, kv_heads = shape
    options: dict[str, Any] = {"norm": norm, "targets": targets, "zeros": zeros, "counted": counted}
    options |= {"batch": batch, "heads": heads, "kv_heads": kv_heads, "size": size, "v_size": v_size}
    for tables in {1, batch}:
        check(Case(dtype=dtype, tables=tables, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_one_projection(dtype):
    check(Case(dtype=dtype, packed=True, batch=3, tables=3))


def test_threads_change_no_bit():
    case = Case(batch=16, heads=24, kv_heads=8, size=128, v_size=128, tables=16, norm=True)
    assert case.batch * case.heads * case.size > cpu_kernel._PARALLEL
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(by_kernel(case))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("counted", [False, True], ids=["", "counted"])
def test_a_full_cache_is_left_alone(counted):
    case = Case(tokens=3, room=2, counted=counted)
    with pytest.raises(IndexError, match="the cache is full: it has room for 2 tokens"):
        by_kernel(case)
    given = inputs(case)
    call = prepared(case, given)
    keys, values = (torch.zeros(2, 2, 2, 20) for _ in "kv")
    length = torch.tensor(2) if counted else None
    assert call.write_to(keys, values, length)
    before = call.state.clone()
    for at in (0,) if counted else (2, -1):
        with pytest.raises(IndexError):
            call(*given["tokens"][0], TokenTables(given["tables"][0]), at)
    assert call.state == before
    assert not keys.any()
    assert not values.any()
    assert length is None or int(length) == 2


def test_a_call_without_a_cache_writes_nowhere():
    given = inputs(Case())
    with pytest.raises(IndexError):
        prepared(Case(), given)(*given["tokens"][0], TokenTables(given["tables"][0]))


def test_sums_in_another_order_are_refused():
    """The kernel adds six numbers in another order than PyTorch."""
    assert not sums_like_torch(6)
    case = Case(size=6, v_size=6, norm=True)
    with pytest.raises(ValueError, match="PyTorch sums 6 numbers in another order"):
        prepared(case, inputs(case))


def lazy(x: Tensor) -> Tensor:
    return torch._neg_view(x)


Change = Callable[[Tensor], Tensor]
UNSUPPORTED: dict[str, tuple[dict[str, Change], str]] = {
    "float64": ({"q": Tensor.double, "k": Tensor.double, "v": Tensor.double}, "does not support torch.float64"),
    "two dtypes": ({"k": Tensor.bfloat16}, "k: .* one dtype, torch.float32 here, got one of torch.bfloat16"),
    "a subclass": ({"v": lambda x: TwoTensor(x, x)}, "v: it takes plain tensors, got a TwoTensor"),
    "two tokens": ({"q": lambda x: x.repeat(1, 2, 1, 1)}, "q: it takes dense heads"),
    "other heads": ({"k": lambda x: x[:, :, :1]}, "k: it takes dense heads"),
    "strided heads": ({"q": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)}, "q: it takes dense heads"),
    "coefficients in bfloat16": ({"alpha": Tensor.bfloat16}, "alpha: .* torch.float32 here, got one of torch.bfloat16"),
    "coefficients of more heads": ({"beta": lambda x: x.repeat(2, 1)}, "beta: it takes contiguous"),
    "a window of 3": ({"alpha": lambda x: x[:, :1].repeat(1, 3)}, "alpha: it takes contiguous"),
    "lazy coefficients": ({"alpha": lazy}, "alpha: "),
    "a state elsewhere": ({"state": lambda x: x.to("meta")}, "state.k: .* on cpu, got one on meta"),
    "a state of other heads": ({"state": lambda x: x[:, :, :1]}, "state.k: it takes contiguous"),
    "a state in another dtype": ({"state": Tensor.half}, "state.k: .* got one of torch.float16"),
    "a gain of another size": ({"gain": lambda x: x[:2]}, "a gain: it takes contiguous"),
    "a gain in float64": ({"gain": Tensor.double}, "a gain: .* got one of torch.float64"),
    "heads too large": (
        {name: lambda x: x.repeat(1, 1, 1, 52) for name in ("q", "k")},
        "heads must be of an even size up to 1024, got 1040 and 20",
    ),
    "an odd size": ({name: lambda x: x[..., 1:] for name in ("q", "k")}, "heads must be of an even size"),
}


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_the_kernel_does_not_take_is_named(change, message):
    given = inputs(Case(norm=True))

    def changed(name: str, x: Tensor) -> Tensor:
        return change.get(name, lambda x: x)(x)

    heads = [changed(name, x) for name, x in zip("qkv", given["tokens"][0], strict=True)]
    state = ShiftState(*(changed("state", row) for row in given["rows"]), 1)
    gain = changed("gain", given["norms"][0].weight)
    with pytest.raises(ValueError, match=message):
        NextToken(*heads, state, changed("alpha", given["alpha"]), changed("beta", given["beta"]), (gain, gain, 1e-5))


UNLIKE: dict[str, Change] = {
    "another dtype": Tensor.double,
    "lazy": lazy,
    "a subclass": lambda x: TwoTensor(x, x),
    "more sequences": lambda x: x.repeat(2, 1, 1, 1),
    "strided": lambda x: torch.cat([x, x], 3)[..., ::2],
    "smaller heads": lambda x: x[..., :10],
}


@pytest.mark.parametrize("change", UNLIKE.values(), ids=UNLIKE)
def test_tokens_unlike_the_first_are_not_taken(change):
    given = inputs(Case())
    call, tables = prepared(Case(), given), TokenTables(given["tables"][1])
    assert call.takes(*given["tokens"][1], tables)
    for i in range(3):
        heads = list(given["tokens"][1])
        heads[i] = change(heads[i])
        assert not call.takes(*heads, tables)


def test_tables_that_do_not_fit_are_not_taken():
    given = inputs(Case())
    call, (cos, sin) = prepared(Case(), given), given["tables"][0]
    for tables in ((cos.double(), sin.double()), (cos[..., :10].contiguous(),) * 2, (cos.repeat(3, 1, 1),) * 2):
        assert not call.takes(*given["tokens"][0], TokenTables(tables))
    for change in (lazy, lambda x: TwoTensor(x, x), lambda x: x[..., ::2], lambda x: x[0], Tensor.double):
        with pytest.raises(ValueError, match="rotary tables cannot be read"):
            TokenTables((cos, change(sin)))


def test_a_cache_that_does_not_fit_is_not_written():
    call = prepared(Case(), inputs(Case()))
    keys = torch.zeros(2, 2, 5, 20)
    assert call.write_to(keys, keys.clone())
    for other in (
        keys.double(),
        keys[:1],
        keys[:, :1],
        keys[..., :10],
        keys[:, :, :4],
        TwoTensor(keys, keys),
        lazy(keys),
    ):
        assert not call.write_to(keys, other)
    assert not call.write_to(keys, keys, torch.zeros(()))
    assert not call.write_to(keys, keys, torch.zeros(2, dtype=torch.int64))


def test_a_call_is_current_while_its_tensors_stay():
    given = inputs(Case(norm=True))
    call = prepared(Case(norm=True), given)
    alpha, beta = (torch.nn.Parameter(given[name]) for name in ("alpha", "beta"))
    gain = given["norms"][0].weight
    call = NextToken(*given["tokens"][0], call.state, alpha, beta, (gain, gain, 1e-5))
    current: tuple[Any, ...] = call.state, (alpha, beta), (gain, gain, 1e-5)
    assert call.is_current(*current)
    assert not call.is_current(call.state.clone(), *current[1:])
    assert not call.is_current(call.state, (beta, alpha), current[2])
    assert not call.is_current(*current[:2], (gain, gain, 1e-6))
    assert not call.is_current(*current[:2], (None, None, 1e-5))
    assert not call.is_current(*current[:2], (gain, gain.clone(), 1e-5))
    alpha.data = alpha.data.clone()
    assert not call.is_current(*current)


def test_nothing_is_prepared_without_the_kernel(monkeypatch, tmp_path):
    given = inputs(Case())
    monkeypatch.setattr(cpu_kernel, "__file__", str(tmp_path / "kernel.py"))
    cpu_kernel._kernels.cache_clear()
    assert next_token_dtypes() == ()
    with pytest.raises(ValueError, match="was not built"):
        prepared(Case(), given)


def test_the_operations_of_the_comparison_are_themselves_right():
    """One head by hand: y = alpha[0] k + alpha[1] state, then rotated."""
    case = Case(batch=1, heads=1, kv_heads=1, size=2, v_size=1, tokens=1)
    given = inputs(case)
    (_, k, v), (cos, sin) = given["tokens"][0], given["tables"][0]
    _, keys, values, *_ = by_operations(case)
    now, before = given["alpha"][0].double().tolist()
    y = k.double().flatten() * now + given["rows"][0].double().flatten() * before
    a, b = cos.double().flatten()[0], sin.double().flatten()[1]
    expected = torch.stack([y[0] * a - y[1] * b, y[1] * a + y[0] * b])
    torch.testing.assert_close(keys.flatten().double(), expected, rtol=1e-5, atol=1e-6)
    now, before = given["beta"][0].double().tolist()
    torch.testing.assert_close(
        values.flatten().double(),
        v.double().flatten() * now + given["rows"][1].double().flatten() * before,
        rtol=1e-5,
        atol=1e-6,
    )
