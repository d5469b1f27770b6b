"""No kernel uses the memory of a tensor that has none, or holds other numbers: wrappers, lazy and sparse tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from kvshift.ops import ShiftState, kv_shift
from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.cpu.kernel import Pool
from kvshift.ops.memory import is_lazy, resolve, unreadable_reason

from .conftest import skip_unless_built

B, T, G, D = 2, 5, 3, 6
CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def negative(x: Tensor) -> Tensor:
    """Return x, with the opposite sign in memory."""
    return torch.complex(torch.zeros_like(x), x.neg()).conj().imag


LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "a negative view": negative,
    "a zero tensor": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
}


@pytest.fixture(params=["auto", "cpu", "eager", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    skip_unless_built(request.param)
    return request.param


@pytest.mark.parametrize("change", LAZY)
def test_lazy_tensors_are_recognised_and_resolved(change):
    x = LAZY[change](normal(2, 3))
    assert is_lazy(x)
    assert not is_lazy(resolve(x))
    assert torch.equal(resolve(x), x)
    assert not is_lazy(normal(2))
    assert resolve(kept := normal(2)) is kept


def test_reasons():
    x = normal(2, 3)
    assert unreadable_reason(x, CPU, torch.float32) is None
    assert "a TwoTensor" in str(unreadable_reason(TwoTensor(x, x), CPU))
    assert "layout torch.sparse_coo" in str(unreadable_reason(x.to_sparse(), CPU))
    assert "on cpu, got one on meta" in str(unreadable_reason(x.to("meta"), CPU))
    assert "torch.float64 here" in str(unreadable_reason(x, CPU, torch.float64))


def call(backend: str, given: dict[str, Tensor], packed: bool) -> list[Tensor]:
    """Return all results of `kv_shift`, or of `shift_norm_rope` if rotary tables are given."""
    where: dict[str, Any] = {"backend": backend}
    if packed:
        where["seq_idx"] = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    q, k, v, alpha, beta, *others = given.values()
    if "cos" in given:
        return list(shift_norm_rope(q, k, v, alpha, beta, rotary=tuple(others), keep_state=False, **where)[:3])
    k_hat, v_hat, new = kv_shift(k, v, alpha, beta, state=ShiftState(*others, 1), **where)
    return [k_hat, v_hat, new.k, new.v]


def arguments(rotated: bool) -> dict[str, Tensor]:
    given = {name: normal(B, T, G, D, seed=i) for i, name in enumerate(("q", "k", "v"))}
    given |= {name: normal(G, 2, seed=i) for i, name in enumerate(("alpha", "beta"))}
    if rotated:
        return given | {"cos": normal(1, T, 1, D // 2).cos(), "sin": normal(1, T, 1, D // 2).sin()}
    return given | {name: normal(B, 1, G, D, seed=i) for i, name in enumerate(("k_state", "v_state"))}


@pytest.mark.interpreted
@pytest.mark.parametrize("rotated", [False, True], ids=["", "rotated"])
@pytest.mark.parametrize("change", LAZY)
def test_lazy_tensors_are_read_with_their_numbers(change, rotated, backend):
    given = arguments(rotated)
    for name in list(given)[not rotated :]:
        lazy = given | {name: LAZY[change](given[name])}
        resolved = given | {name: lazy[name].clone()}
        for packed in (False, True):
            for result, expected in zip(call(backend, lazy, packed), call(backend, resolved, packed), strict=True):
                assert torch.equal(result, expected), name


def gradients(backend: str, of_results: Callable[[Tensor], Tensor], packed: bool) -> list[Tensor]:
    leaves = {name: x.requires_grad_() for name, x in arguments(rotated=False).items() if name != "q"}
    results = call(backend, {"q": torch.empty(0)} | leaves, packed)
    upstream = [of_results(normal(*y.shape)) for y in results]
    return list(torch.autograd.grad(results, list(leaves.values()), upstream))


def halves(x: Any) -> tuple[Tensor, Tensor]:
    """Return both tensors of a wrapper, or the same one twice."""
    return (x.a, x.b) if isinstance(x, TwoTensor) else (x, x)


@pytest.mark.interpreted
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("change", LAZY)
def test_gradients_that_are_not_in_memory(change, packed, backend):
    values = torch.zeros_like if change == "a zero tensor" else Tensor.clone
    for result, expected in zip(
        gradients(backend, LAZY[change], packed), gradients(backend, values, packed), strict=True
    ):
        assert torch.equal(result, expected)


@pytest.mark.interpreted
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_gradients_that_are_wrappers(packed, backend):
    """The address of a wrapper would be read beyond its end; what it holds would be added up in one plain tensor."""
    first = gradients(backend, Tensor.clone, packed)
    for result, expected in zip(gradients(backend, lambda x: TwoTensor(x, 3 * x), packed), first, strict=True):
        for half, factor in zip(halves(result), (1, 3), strict=True):
            torch.testing.assert_close(half, factor * expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("positions", [1, T])
@pytest.mark.parametrize("wrapped", [1, 2, 9])
def test_results_of_wrappers_are_those_of_what_they_hold(wrapped, positions):
    """Also where some of the tensors are plain: a sum in place would then be counted once for each tensor held."""
    shapes = dict.fromkeys("qkv", (B, positions, G, D)) | dict.fromkeys(("alpha", "beta"), (G, 2))
    shapes |= dict.fromkeys(("state.k", "state.v"), (B, 1, G, D)) | dict.fromkeys(("cos", "sin"), (1, positions, 1, D))
    here, there = (
        {name: normal(*shape, seed=i + at) for i, (name, shape) in enumerate(shapes.items())} for at in (0, 9)
    )

    def results(given: dict[str, Tensor]) -> list[Any]:
        q, k, v, alpha, beta, *rows, cos, sin = given.values()
        with torch.no_grad():
            *found, new = shift_norm_rope(q, k, v, alpha, beta, rotary=(cos, sin), state=ShiftState(*rows, 1))
        assert new is not None
        return [*found, new.k, new.v]

    for names in itertools.combinations(shapes, wrapped):
        found = results({name: TwoTensor(here[name], there[name]) if name in names else here[name] for name in shapes})
        for i, other in enumerate((here, there)):
            expected = results({name: (other if name in names else here)[name] for name in shapes})
            for result, each in zip(found, expected, strict=True):
                torch.testing.assert_close(halves(result)[i], each, msg=f"{names}")


def test_a_sparse_gradient_is_refused_or_right(backend):
    try:
        found = gradients(backend, Tensor.to_sparse, packed=False)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        assert "sparse" in str(error).lower()  # noqa: PT017
        return
    for result, other in zip(found, gradients(backend, Tensor.clone, packed=False), strict=True):
        torch.testing.assert_close(result, other)


SAVED: dict[str, Callable[[Tensor], Tensor]] = {
    "lazy": lambda x: negative(x) if x.is_floating_point() else x,
    "a wrapper": lambda x: TwoTensor(x, x),
    "of another dtype": lambda x: x.double() if x.is_floating_point() else x,
    "strided": lambda x: x.unsqueeze(-1).expand(*x.shape, 2).clone()[..., 0],
}


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("change", SAVED)
def test_saved_tensors_that_hooks_replace(change, packed):
    skip_unless_built("cpu")
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, SAVED[change]):
        found = gradients("cpu", Tensor.clone, packed)
    for result, expected in zip(found, gradients("cpu", Tensor.clone, packed), strict=True):
        torch.testing.assert_close(result, expected, check_dtype=False)


POOL: dict[str, tuple[dict[str, Callable[[Tensor], Tensor]], str]] = {
    "a wrapper": ({"x": lambda x: TwoTensor(x, x)}, "x cannot be used by the CPU kernel: it takes plain tensors"),
    "lazy": ({"x": negative}, "x cannot be used .* its memory holds other numbers"),
    "of another dtype": ({"y": Tensor.double}, "y cannot be used .* torch.float32 here, got one of torch.float64"),
    "rows of 64 bits": ({"sources": Tensor.long}, "sources cannot be used .* torch.int32 here"),
    "on another device": ({"kept": lambda x: x.to("meta")}, "kept cannot be used .* on cpu, got one on meta"),
    "too short": ({"y": lambda y: y[:3]}, "x and y must be rows of 18 numbers of 5 tokens or more"),
    "too narrow": ({"x": lambda x: x[:, 1:]}, "x and y must be rows of 18 numbers"),
    "strided": ({"y": lambda y: y.t().contiguous().t()}, "contiguous"),
}


@pytest.mark.parametrize(("change", "message"), POOL.values(), ids=POOL)
def test_a_pool_names_what_it_cannot_read(change, message):
    skip_unless_built("cpu")
    pool, rows = Pool(normal(G, 2), D, torch.float32), normal(7, G * D)
    given = {"x": normal(T, G * D), "y": torch.empty(T, G * D)}
    given |= {"sources": torch.zeros(T, 2, dtype=torch.int32), "kept": torch.zeros(T, dtype=torch.int32)}
    changed = {name: change.get(name, Tensor.clone)(x) for name, x in given.items()}
    with pytest.raises(ValueError, match=message):
        pool.shift(changed["x"], changed["y"], rows.data_ptr(), len(rows), changed["sources"], changed["kept"])
