"""Every bad argument raises an error that names it, what it is, and what it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvshift.ops import BACKENDS, ShiftState, shift_tokens

from .cases import Case, random_case
from .conftest import skip_unless_built

ROWS = random_case(2, rows=2)  # k is (2, 11, 3, 7), v is (2, 11, 3, 5)
PACK = random_case(3, lengths=[2, 0, 3], rows=2)


def bounds(*numbers: int) -> dict[str, torch.Tensor]:
    return {"cu_seqlens": torch.tensor(numbers, dtype=torch.int32)}


def state(k: tuple[int, ...], v: tuple[int, ...], max_rows: int = 2, **kwargs) -> dict[str, ShiftState]:
    return {"state": ShiftState(torch.zeros(k, **kwargs), torch.zeros(v, **kwargs), max_rows)}


def not_rising(*numbers: int) -> tuple[dict[str, torch.Tensor], str]:
    given = ", ".join(map(str, numbers))
    return bounds(*numbers), rf"cu_seqlens must be non-decreasing from 0 to 5, .*; got \[{given}\]"


meta = ROWS.map(lambda x: x.to("meta"))
BAD: list[tuple[Case, type[Exception], dict[str, tuple[dict, str]]]] = [
    (ROWS, TypeError, {
        "k is a list": ({"k": [1.0]}, r"k must be a tensor .*, got list"),
        "integer k": ({"k": ROWS.k.long()}, r"k must be of a floating-point dtype; k is .* torch.int64"),
        "complex v": ({"v": ROWS.v.cfloat()}, r"v must be of a floating-point dtype; v is .* torch.complex64"),
        "alpha is a number": ({"alpha": 0.5}, r"alpha must be a tensor \(heads, window\), got float"),
        "state is a tuple": ({"state": (ROWS.k, ROWS.v)}, r"state must be a ShiftState or None, got tuple"),
        "state of lists": ({"state": ShiftState([0.0], [0.0], 1)}, r"state.k must be a tensor .*, got list"),
        "mask is a list": ({"mask": [[True] * 11] * 2}, r"mask must be a tensor or None, got list"),
        "mask of floats": ({"mask": torch.ones(2, 11)}, r"mask must be of dtype torch.bool, .* torch.float32"),
        "mask of integers": ({"mask": torch.ones(2, 11).long()}, r"mask must be of dtype torch.bool"),
        "seq_idx is a list": ({"seq_idx": [0] * 11}, r"seq_idx must be a tensor or None, got list"),
        "seq_idx of floats": ({"seq_idx": torch.zeros(2, 11)}, r"seq_idx must be of an integer dtype, .*float32"),
        "seq_idx of booleans": ({"seq_idx": torch.zeros(2, 11).bool()}, r"seq_idx must be of an integer dtype"),
        "seq_idx of unsigned integers that PyTorch does not compute with": (
            {"seq_idx": torch.zeros(2, 11, dtype=torch.uint16)},
            r"seq_idx must be of an integer dtype, uint8, int8, int16, int32, int64; .* torch.uint16",
        ),
        "sparse k": ({"k": ROWS.k.to_sparse()}, r"k must be a dense tensor .* layout torch.sparse_coo"),
        "k of MKL-DNN": ({"k": ROWS.k.to_mkldnn()}, r"k must be a dense tensor .* layout torch._mkldnn"),
        "nested v": (
            {"v": torch.nested.as_nested_tensor(list(ROWS.v), layout=torch.jagged)},
            r"v must be a dense tensor .* got a nested one",
        ),
        "sparse alpha": ({"alpha": ROWS.alpha.to_sparse()}, r"alpha must be a dense tensor \(heads, win"),
        "sparse state": ({"state": ShiftState(ROWS.state.k.to_sparse(), ROWS.state.v, 2)}, r"state.k must be a dense"),
        "sparse mask": ({"mask": torch.ones(2, 11).bool().to_sparse()}, r"mask must be a dense tensor or None"),
    }),
    (ROWS, ValueError, {
        "k of 3 dimensions": ({"k": ROWS.k[0]}, r"k must have 4 dimensions .*; k is \(11, 3, 7\)"),
        "v of 5 dimensions": ({"v": ROWS.v[None]}, r"v must have 4 dimensions .*; v is \(1, 2, 11, 3, 5\)"),
        "rows of v": ({"v": ROWS.v[:1]}, r"v must match k in batch.* v is \(1, 11, 3, 5\)"),
        "positions of v": ({"v": ROWS.v[:, :7]}, r"v must match k in .*positions.* v is \(2, 7, 3, 5\)"),
        "heads of v": ({"v": ROWS.v[:, :, :2]}, r"v must match k in .*heads.* v is \(2, 11, 2, 5\)"),
        "dtype of v": ({"v": ROWS.v.half()}, r"v must match k in .*dtype.* v is .* torch.float16"),
        "device of v": ({"v": meta.v}, r"v must match k in .*device.* v is .* on meta"),
        "no coefficients": ({"alpha": None, "beta": None}, r"alpha and beta are both None"),
        "alpha of 1 dimension": ({"alpha": ROWS.alpha[:, 0]}, r"alpha must be \(heads, window\) with 3 heads"),
        "heads of alpha": ({"alpha": ROWS.alpha[:2]}, r"alpha must be .* with 3 heads .*; alpha is \(2, 2\)"),
        "window of 1": ({"beta": ROWS.beta[:, :1]}, r"beta must be .* window >= 2; beta is \(3, 1\)"),
        "integer alpha": ({"alpha": ROWS.alpha.int()}, r"alpha must be of a floating-point dtype on cpu"),
        "device of beta": ({"beta": meta.beta}, r"beta must be .* on cpu; beta is .* on meta"),
        "two windows": ({"beta": torch.zeros(3, 3)}, r"alpha and beta must have the same shape; .*\(3, 3\)"),
        "rows of state": (state((3, 2, 3, 7), (3, 2, 3, 5)), r"state.k must be \(2, rows, 3, 7\).*\(3, 2, 3, 7\)"),
        "heads of state": (state((2, 2, 2, 7), (2, 2, 2, 5)), r"state.k must be \(2, rows, 3, 7\)"),
        "size of state": (state((2, 2, 3, 7), (2, 2, 3, 7)), r"state.v must be \(2, rows, 3, 5\).*\(2, 2, 3, 7\)"),
        "flat state": (state((2, 3, 7), (2, 3, 5)), r"state.k must be \(2, rows, 3, 7\)"),
        "dtype of state": (
            state((2, 2, 3, 7), (2, 2, 3, 5), dtype=torch.float64),
            r"state.k must be torch.float32 on cpu; state.k is .* torch.float64",
        ),
        "device of state": (state((2, 2, 3, 7), (2, 2, 3, 5), device="meta"), r"state.k must be .* on cpu;.* meta"),
        "more keys than values": (state((2, 2, 3, 7), (2, 1, 3, 5)), r"state .* got 2 rows of keys and 1 of values"),
        "more rows than kept": (state((2, 3, 3, 7), (2, 3, 3, 5)), r"state .* got 3 rows .* max_rows = 2"),
        "shape of mask": ({"mask": torch.ones(2, 10).bool()}, r"mask must be \(2, 11\) .*; mask is \(2, 10\)"),
        "mask of 4 dimensions": ({"mask": torch.ones(2, 1, 11, 11).bool()}, r"mask must be \(2, 11\)"),
        "device of mask": ({"mask": torch.ones(2, 11).bool().to("meta")}, r"mask must be .* on cpu; .* on meta"),
        "shape of seq_idx": ({"seq_idx": torch.zeros(11).long()}, r"seq_idx must be \(2, 11\) .*; seq_idx is \(11,\)"),
        "a pack of two rows": (bounds(0, 11), r"with cu_seqlens the batch must be 1 row .*, got 2 rows"),
        "short state": (
            {"alpha": torch.zeros(3, 4), "beta": torch.zeros(3, 4), **state((2, 2, 3, 7), (2, 2, 3, 5))},
            r"state.k must be \(2, rows, 3, 7\) with rows >= 3 \(window - 1\); state.k is \(2, 2, 3, 7\)",
        ),
    }),
    (PACK, TypeError, {
        "cu_seqlens is a list": ({"cu_seqlens": [0, 2, 2, 5]}, r"cu_seqlens must be a tensor or None, got list"),
        "cu_seqlens of floats": ({"cu_seqlens": torch.tensor([0.0, 5.0])}, r"cu_seqlens must be of dtype torch.int32"),
    }),
    (PACK, ValueError, {
        "documents named twice": ({"seq_idx": torch.zeros(1, 5).long()}, r"cu_seqlens and seq_idx both name .* one"),
        "cu_seqlens of 2 dimensions": ({"cu_seqlens": PACK.cu_seqlens[None]}, r"cu_seqlens must be \(sequences \+ 1"),
        "cu_seqlens of nothing": (bounds(), r"cu_seqlens must be \(sequences \+ 1,\) .* cu_seqlens is \(0,\)"),
        "device of cu_seqlens": ({"cu_seqlens": PACK.cu_seqlens.to("meta")}, r"cu_seqlens must be .* on cpu.* on meta"),
        "cu_seqlens without state": (bounds(0, 5), r"state.k must be \(1, rows, 3, 7\).*; state.k is \(3, 2, 3, 7\)"),
        "cu_seqlens that fall": not_rising(0, 3, 2, 5),
        "cu_seqlens from 1": not_rising(1, 2, 2, 5),
        "cu_seqlens too short": not_rising(0, 2, 2, 4),
        "cu_seqlens too long": not_rising(0, 2, 2, 6),
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "error", "bad", "message"),
    [pytest.param(case, error, *row, id=name) for case, error, rows in BAD for name, row in rows.items()],
)
def test_a_bad_argument_is_named(case, error, bad, message, backend):
    with pytest.raises(error, match=message):
        replace(case, **bad).call(backend)


class Subclass(torch.Tensor):
    """A tensor subclass; many subclasses have no memory of their own, and their address is 0."""


X = torch.randn(1, 3, 2, 4)
REFUSED = {
    ("cpu", "it runs on the CPU, the tensors are on meta"): (X.to("meta"), 2),
    ("triton", "it runs on CUDA devices .*, the tensors are on meta"): (X.to("meta"), 2),
    ("cpu", "it supports windows up to 16, got 17"): (X, 17),
    ("triton", "it supports windows up to 8, got 9"): (X, 9),
    **{
        (backend, message): (x, 2)
        for backend in ("cpu", "triton")
        for message, x in {
            "it supports float32.*, the tensors are torch.float8_e5m2": X.to(torch.float8_e5m2),
            "it takes plain tensors, got a Subclass": X.as_subclass(Subclass),
        }.items()
    },
}


@pytest.mark.parametrize(("backend", "message"), REFUSED, ids=str)
def test_what_kernels_cannot_take_they_refuse_by_name(backend, message):
    skip_unless_built(backend)
    x, window = REFUSED[backend, message]
    with pytest.raises(ValueError, match=f'backend "{backend}" cannot be used here: {message}'):
        shift_tokens(x, torch.ones(2, window, device=x.device), backend=backend)


@pytest.mark.parametrize("argument", ["v", "alpha", "beta", "mask", "state.k", "state.v"])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_kernels_take_a_call_only_if_every_tensor_is_plain(argument, backend):
    skip_unless_built(backend)
    case = random_case(13, rows=1, mask=[[1] * 11, [0] + [1] * 10])
    whole, name = (case.state, argument.removeprefix("state.")) if "." in argument else (case, argument)
    changed = replace(whole, **{name: getattr(whole, name).as_subclass(Subclass)})
    odd = changed if whole is case else replace(case, state=changed)
    with pytest.raises(ValueError, match=f'"{backend}" cannot be used here: it takes plain tensors, got a Subclass'):
        odd.call(backend)
    for result, expected in zip(odd.call("auto")[:2], case.call("eager")[:2], strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("positions", [1, 11])
def test_an_unknown_backend_is_named(positions):
    case = random_case(5, positions=positions, rows=1)
    with pytest.raises(ValueError, match=f"backend must be one of {', '.join(map(repr, BACKENDS))}; got 'trition'"):
        case.call("trition")


def test_boundaries_on_a_device_without_data_are_accepted():
    """The meta device has no data, so only shapes are checked."""
    case = PACK.map(lambda x: x.to("meta"))
    k_hat, v_hat, new_state = replace(case, cu_seqlens=PACK.cu_seqlens.to("meta")).call("eager")
    assert (k_hat.shape, v_hat.shape) == (case.k.shape, case.v.shape)
    assert (new_state.k.shape, new_state.v.shape) == (case.state.k.shape, case.state.v.shape)
    assert {x.device.type for x in (k_hat, v_hat, new_state.k, new_state.v)} == {"meta"}


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"x": ROWS.k[0]}, ValueError, r"x must have 4 dimensions"),
        ({"coefficients": ROWS.alpha[:2]}, ValueError, r"coefficients must be \(heads, window\) with 3 heads"),
        ({"state": ROWS.k[:, :0]}, ValueError, r"state must be \(2, rows, 3, 7\) with rows >= 1"),
        ({"state": ROWS.k.half()}, ValueError, r"state must be torch.float32 on cpu; state is .* torch.float16"),
        ({"state": ROWS.k, "max_rows": 3}, ValueError, r"max_rows must be at least the number of rows .*, 11; got 3"),
        ({"max_rows": 0}, ValueError, r"max_rows must be at least the number of rows of state, 1; got 0"),
        ({"backend": "cuda"}, ValueError, r"backend must be one of .*; got 'cuda'"),
        ({"cu_seqlens": PACK.cu_seqlens}, ValueError, r"with cu_seqlens the batch must be 1 row"),
        ({"mask": ROWS.k[..., 0, 0]}, TypeError, r"mask must be of dtype torch.bool"),
    ],
    ids=["x", "coefficients", "short state", "dtype", "max_rows", "no rows", "backend", "cu_seqlens", "mask"],
)
def test_a_bad_argument_of_shift_tokens_is_named(bad, error, message):
    with pytest.raises(error, match=message):
        shift_tokens(**{"x": ROWS.k, "coefficients": ROWS.alpha, **bad})


STATE = ShiftState.zeros(3, 5, 7, rows=2)


BAD_STATE: dict[str, tuple[Callable, type[Exception], str]] = {
    "no rows": (lambda: ShiftState.zeros(3, 5, 7, rows=0), ValueError, r"rows must be at least 1 .*, got 0"),
    "table": (lambda: STATE.select([[0]]), ValueError, r"indices must have one dimension, got shape \(1, 1\)"),
    "floats": (lambda: STATE.select([0.0]), TypeError, r"indices must be integers or booleans, got torch.float32"),
    "few booleans": (lambda: STATE.select([True, False]), ValueError, r"boolean indices must have length 3, got 2"),
    "unknown row": (lambda: STATE.select([3]), IndexError, r"out of range"),
    "few beams": (lambda: STATE.reorder([0, 1]), ValueError, r"beam_indices must be 3 integers, .* of shape \(2,\)"),
    "boolean beams": (lambda: STATE.reorder([True] * 3), ValueError, r"beam_indices must be 3 integers, .*torch.bool"),
    "real beams": (lambda: STATE.reorder(torch.ones(3)), ValueError, r"beam_indices must be 3 integers, .*float32"),
    "negative crop": (lambda: STATE.crop(-1), ValueError, r"tokens must be 0 or more, got -1"),
    "no window": (lambda: STATE.crop(0, window=1), ValueError, r"window must be 2 or more, got 1"),
    "sizes": (lambda: STATE.split([1, 1]), RuntimeError, r"sum exactly to 3"),
    "no states": (lambda: ShiftState.stack([]), ValueError, r"states must hold at least one ShiftState"),
    "rows": (
        lambda: ShiftState.stack([STATE, STATE.crop(1)]),
        ValueError,
        r"states\[0\] has 2 of 2, states\[1\] has 1",
    ),
    "dtypes": (lambda: ShiftState.stack([STATE, STATE.to(torch.half)]), ValueError, r"states\[1\] is torch.float16"),
    "queries": (
        lambda: ShiftState.stack([STATE, replace(STATE, q=STATE.k)]),
        ValueError,
        r"states must all carry queries or none: states\[0\] and states\[1\] differ",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD_STATE.values(), ids=BAD_STATE)
def test_a_bad_argument_of_a_state_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
