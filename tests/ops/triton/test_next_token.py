"""The next token in one launch, compared with the reference; the kernel runs in Triton's interpreter."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.ops import ShiftState
from kvshift.ops.rope import half_tables
from kvshift.ops.triton import next_token
from kvshift.ops.triton.next_token import NextToken, TokenTables

from ...covering import covering
from ..conftest import skip_unless_built
from ..fused_cases import FusedCase, Outputs, random_fused
from ..fused_rounding import assert_within_rounding
from ..mutants import Mutant

pytestmark = pytest.mark.interpreted

ROOM, AT = 9, 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def kernels_that_run() -> None:
    if DEVICE.type == "cpu":
        skip_unless_built("triton")


class Layer:
    """One layer of a cache with AT random tokens, and what was in it before the next token.

    Args:
        static: whether the number of tokens is on the device.
        full: whether the rotary tables are as wide as a head, those of sines with a negated first half.
        apart: whether q, k and v are tensors of their own, not parts of one projection.
        stateless: whether to leave out the state.
    """

    def __init__(
        self,
        case: FusedCase,
        *,
        static: bool = False,
        full: bool = True,
        apart: bool = False,
        stateless: bool = False,
    ) -> None:
        (batch, _, heads, size), v_size = case.k.shape, case.v.shape[3]
        generator = torch.Generator().manual_seed(5)

        def random(size: int) -> Tensor:
            return torch.randn(batch, heads, ROOM, size, generator=generator).to(case.k.dtype).to(DEVICE)

        self.keys, self.values = random(size), random(v_size)
        self.before = self.keys.clone(), self.values.clone()
        state = (None, None) if stateless else (case.k_state, case.v_state)
        self.state = [None if x is None else x.clone().to(DEVICE) for x in state]
        self.length = torch.tensor(AT, device=DEVICE) if static else None
        self.full, self.apart = full, apart
        q, k, v, _ = self.given(case)
        weights = [None if x is None else x.to(DEVICE) for x in (case.alpha, case.beta, case.q_scale, case.k_scale)]
        rows = None if stateless else ShiftState(*self.state, 1)
        self.call = NextToken(q, k, v, rows, *weights[:2], (*weights[2:], case.eps))
        assert self.call.write_to(self.keys, self.values, self.length)

    def given(self, case: FusedCase) -> tuple[Tensor, Tensor, Tensor, TokenTables]:
        """Return q, k and v, of which `apart` says whether they are parts of one tensor, and the tables."""
        cos, sin = case.cos.unsqueeze(2), case.sin.unsqueeze(2)
        if self.full:
            cos, sin = half_tables(case.cos.repeat(1, 1, 2), case.sin.repeat(1, 1, 2))
        assert case.q is not None
        parts = [x.to(DEVICE) for x in (case.q, case.k, case.v)]
        if not self.apart:
            flat = torch.cat([x.flatten(2) for x in parts], 2).split([x[0].numel() for x in parts], 2)
            parts = [y.unflatten(2, x.shape[2:]) for x, y in zip(parts, flat, strict=True)]
        q, k, v = parts
        return q, k, v, TokenTables((cos.to(DEVICE), sin.to(DEVICE)))

    def decode(self, case: FusedCase, at: int = AT) -> Tensor:
        """Compute the next token, and return q, (B, H, 1, D)."""
        given = self.given(case)
        assert self.call.takes(*given)
        return self.call(*given, at)

    def assert_nothing_else_was_written(self, case: FusedCase, at: int = AT) -> None:
        for found, before in zip((self.keys, self.values), self.before, strict=True):
            others = [t for t in range(ROOM) if t != at]
            assert torch.equal(found[:, :, others], before[:, :, others]), "another place of the cache was written"
        for state, x in zip(self.state, (case.k, case.v), strict=True):
            assert state is None or torch.equal(state.cpu().nan_to_num(7.0), x.nan_to_num(7.0)), "the state is not x"
        if self.length is not None:
            assert self.length.item() == at + 1
            assert self.call._ticket.item() == 0, "the ticket was not returned"


def one_token(seed: int = 2, batch: int = 2, **options: Any) -> FusedCase:
    return random_fused(seed, batch, 1, **{"queries": 6, "heads": 3, "k_dim": 12, "v_dim": 20, "rows": 1, **options})


def check(case: FusedCase, **options: bool) -> None:
    layers = []

    def decoded(case: FusedCase) -> Outputs:
        layer = Layer(case, **options)
        q = layer.decode(case)
        layer.assert_nothing_else_was_written(case)
        layers.append(layer)
        k, v = (x[:, :, AT : AT + 1] for x in (layer.keys, layer.values))
        return tuple(x.transpose(1, 2).cpu() for x in (q, k, v))  # type: ignore[return-value]

    assert_within_rounding(case, decoded)


KINDS: dict[str, tuple] = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "batch": (1, 3),
    "heads": ((6, 2), (1, 1)),
    "sizes": ((16, 16), (12, 20), (2, 1)),
    "norm": (False, True),
    "shifted": ("kv", "k", "v"),
    "tables": (False, True),
    "static": (False, True),
    "full": (False, True),
}


def check_kind(
    dtype: torch.dtype, batch: int, heads: tuple[int, int], sizes: tuple[int, int], norm: bool, shifted: str,
    tables: bool, static: bool, full: bool,
) -> None:  # fmt: skip
    case = one_token(
        3, batch, dtype=dtype, queries=heads[0], heads=heads[1], k_dim=sizes[0], v_dim=sizes[1], norm=norm,
        shifted=shifted, tables=batch if tables else 1, table_dtype=torch.float32 if norm == static else None,
    )  # fmt: skip
    check(case, static=static, full=full, apart=tables == norm)


@covering(**KINDS)
def test_it_is_exact_but_for_rounding(dtype, batch, heads, sizes, norm, shifted, tables, static, full):
    check_kind(dtype, batch, heads, sizes, norm, shifted, tables, static, full)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS["dtype"], ids=str)
def test_every_kind_is_exact_but_for_rounding(dtype):
    for kind in itertools.product(*list(KINDS.values())[1:]):
        check_kind(dtype, *kind)


def test_without_shift_there_is_no_state():
    check(one_token(shifted=""), stateless=True)


@pytest.mark.parametrize("static", [False, True])
def test_a_zero_coefficient_reads_nothing(static):
    """An infinite row before a weight of zero, and NaN in a token that is not used."""
    case = one_token(norm=False)
    assert case.alpha is not None
    assert case.beta is not None
    assert case.k_state is not None
    case.alpha[0, 1] = 0
    case.beta[1, 0] = 0
    case.k_state[:, :, 0] = torch.inf
    case.v[:, :, 1] = torch.nan
    layer = Layer(case, static=static)
    q = layer.decode(case)
    layer.assert_nothing_else_was_written(case)
    assert all(x.isfinite().all() for x in (q, layer.keys, layer.values))


@pytest.mark.parametrize("static", [False, True])
def test_tokens_one_after_another(static):
    """The state of a token is the one before it, and the length counts them."""
    cases = [one_token(seed) for seed in (5, 6, 7)]
    layer = Layer(cases[0], static=static)
    for i, case in enumerate(cases[1:], AT + 1):
        layer.decode(cases[i - AT - 1], i - 1)
        fresh = Layer(replace(case, k_state=cases[i - AT - 1].k, v_state=cases[i - AT - 1].v))
        weights = {name: getattr(cases[0], name) for name in ("alpha", "beta", "q_scale", "k_scale")}
        fresh = Layer(replace(case, k_state=cases[i - AT - 1].k, v_state=cases[i - AT - 1].v, **weights))
        q = layer.decode(case, i)
        assert torch.equal(q, fresh.decode(case, i))
        assert torch.equal(layer.keys[:, :, i], fresh.keys[:, :, i])
        assert torch.equal(layer.values[:, :, i], fresh.values[:, :, i])
        if layer.length is not None:
            assert layer.length.item() == i + 1
            layer.length.sub_(1)  # the loop decodes each token twice
        for state, x in zip(layer.state, (cases[i - AT].k, cases[i - AT].v), strict=True):
            assert state is not None
            assert torch.equal(state.cpu(), x)


def test_nothing_is_written_beyond_the_end():
    """A number on the device that is too large writes nothing; one of the host is refused."""
    case = one_token()
    layer = Layer(case, static=True)
    assert layer.length is not None
    for full in (ROOM, ROOM + 3, 2**40):
        layer.length.fill_(full)
        layer.decode(case)
        assert torch.equal(layer.keys, layer.before[0])
        assert torch.equal(layer.values, layer.before[1])
    for at in (-1, ROOM, 2**40):
        with pytest.raises(IndexError, match=f"the cache is full: it has room for {ROOM} tokens, and holds {at}"):
            layer.decode(case, at)


# Refusals


def test_what_does_not_fit_is_refused_by_name():
    case = one_token(dtype=torch.bfloat16)
    layer = Layer(case, apart=True)
    q, k, v, _ = layer.given(case)
    state = ShiftState(*layer.state, 1)
    for named, given in {
        "q: it takes adjacent heads": (q[:, :, ::2], k, v, state, case.alpha, case.beta),
        "k: it takes tensors of one dtype": (q, k.float(), v, state, case.alpha, case.beta),
        "k: it must be": (q, k[:, :, 1:], v, state, case.alpha, case.beta),
        "alpha: it takes tensors of one dtype": (q, k, v, state, case.alpha.bfloat16(), None),
        "beta: it must be": (q, k, v, state, None, case.beta[:, :1]),
        "state must be given": (q, k, v, None, case.alpha, None),
        r"state\.v: it takes tensors of one dtype": (q, k, v, ShiftState(state.k, state.v.float(), 1), None, case.beta),
        "heads must be of an even size": (q[..., :11], k[..., :11], v, state, None, None),
        "the kernel of the next token does not support torch.float64": (
            *(x.double() for x in (q, k, v)), state, None, None
        ),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^{named}"):
            NextToken(*given)
    for cos, sin in ((case.cos, case.sin), (case.cos.unsqueeze(2)[..., ::2], case.sin.unsqueeze(2)[..., ::2])):
        with pytest.raises(ValueError, match=r"^cos cannot be read by the Triton kernel"):
            TokenTables((cos, sin))


def test_what_it_does_not_take():
    """Other tensors than those it was prepared for, and caches that it cannot write to."""
    case = one_token(dtype=torch.bfloat16)
    layer = Layer(case, apart=True)
    call, (q, k, v, tables) = layer.call, layer.given(case)
    assert call.takes(q, k, v, tables)
    for others in (
        (q.float(), k, v),
        (q[:1], k, v),
        (q, torch.cat((k, k), 3)[..., : k.shape[3]], v),
        (q, k, v[..., 1:]),
    ):
        assert not call.takes(*others, tables)
    wider = TokenTables(tuple(torch.ones(1, 1, 1, 2 * q.shape[3], device=DEVICE) for _ in range(2)))
    rows = TokenTables(tuple(torch.ones(3, 1, 1, q.shape[3], device=DEVICE) for _ in range(2)))
    assert not call.takes(q, k, v, wider)
    assert not call.takes(q, k, v, rows)
    keys, values = layer.keys, layer.values
    for others in ((keys[:, :, 1:], values[:, :, 1:]), (keys.float(), values), (keys, values[:, :, 1:].contiguous())):
        assert not call.write_to(*others)
    assert not call.write_to(keys, values, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert not call.write_to(keys, values, torch.zeros(1, device=DEVICE))
    weights, gains = call.tensors[:2], (*call.tensors[2:], case.eps)
    assert call.is_current(call.state, weights, gains)
    for others in (
        (ShiftState(*layer.state, 1), weights, gains),
        (call.state, (weights[0].clone(), weights[1]), gains),
        (call.state, weights, (*gains[:2], 1.0)),
        (call.state, weights, (None, None, gains[2])),
    ):
        assert not call.is_current(*others)
    with torch.no_grad():
        weights[0].data = weights[0].data.clone()
    assert not call.is_current(call.state, weights, gains)


# Mutants

KERNEL = "triton/next_token_kernel.py"
CHECKS = {
    "rounding": lambda: check(one_token(batch=3, tables=3)),
    "static": lambda: check(one_token(), static=True),
    "half": lambda: check(one_token(), full=False),
    "zeros": lambda: test_a_zero_coefficient_reads_nothing(static=False),
    "end": test_nothing_is_written_beyond_the_end,
    "tokens": lambda: test_tokens_one_after_another(static=True),
}
MUTANTS = {
    "state not replaced": ("tl.store(state + d, now, mask=there)", "pass", "rounding"),
    "state replaced before it is read": (
        "        before = tl.load(state + d",
        "        tl.store(state + d, now, mask=there)\n        before = tl.load(state + d",
        "rounding",
    ),
    "state of the first sequence": ("k_state + (b * G + g) * D", "k_state + g * D", "rounding"),
    "coefficients swapped": (
        "_add(_times(y, tl.load(weights)), before, tl.load(weights + 1))",
        "_add(_times(y, tl.load(weights + 1)), before, tl.load(weights))",
        "rounding",
    ),
    "coefficients of the first head": ("k_weights = alpha + 2 * g", "k_weights = alpha", "rounding"),
    "a zero coefficient read": (
        "_add(_times(y, tl.load(weights)), before, tl.load(weights + 1))",
        "tl.fma(before, tl.load(weights + 1), y * tl.load(weights))",
        "zeros",
    ),
    "keys at another position": (
        "((b * G + g) * room + position) * D\n",
        "((b * G + g) * room + position + 1) * D\n",
        "rounding",
    ),
    "values of another head": (
        "y = values + ((b * G + g) * room + position) * Dv",
        "y = values + ((b * G) * room + position) * Dv",
        "rounding",
    ),
    "written beyond the end": ("fits = position < room", "fits = True", "end"),
    "norm over half a head": (
        "tl.sum(high * high, 0)) / D + EPS)",
        "tl.sum(high * high, 0)) / HALF + EPS)",
        "rounding",
    ),
    "norm before the shift": (
        "tl.rsqrt((tl.sum(low * low, 0)",
        "tl.rsqrt((tl.sum(tl.where(there, tl.load(x + d, mask=there, other=0.0).to(tl.float32), 0.0) * low, 0)",
        "rounding",
    ),
    "tables of the first sequence": ("cos += b * table_b * ALIGN", "cos += b * 0", "rounding"),
    "sines of the other half": ("* ALIGN + SIN", "* ALIGN", "rounding"),
    "strides of other units": ("v + b * v_b * ALIGN", "v + b * v_b", "rounding"),
    "rotation the other way": ("low * c - high * s", "low * c + high * s", "half"),
    "length of every program": ("== tl.num_programs(0) * tl.num_programs(1) - 1", ">= 0", "static"),
    "ticket kept": ("tl.store(ticket, 0)", "pass", "static"),
    "length not counted": ("tl.store(length, position + 1)", "pass", "tokens"),
    "position of the host": ("position = tl.load(length)", "position = position", "end"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name, tmp_path, monkeypatch):
    right, wrong, check_name = MUTANTS[name]
    with changed(right, wrong, tmp_path, monkeypatch), pytest.raises(AssertionError):
        CHECKS[check_name]()


def test_the_copy_that_is_not_changed_passes(tmp_path, monkeypatch):
    same = '"""The next token of generation on a GPU'
    with changed(same, same, tmp_path, monkeypatch):
        for run in CHECKS.values():
            run()


@contextmanager
def changed(right: str, wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launch a changed copy of the kernel within the context."""
    (folder / "mutant_next_token.py").write_text(Mutant(KERNEL, right, wrong).source())
    monkeypatch.syspath_prepend(folder)
    copy = importlib.import_module("mutant_next_token")
    monkeypatch.setattr(next_token, "kernel", lambda: copy.next_token)
    try:
        yield
    finally:
        del sys.modules["mutant_next_token"]
