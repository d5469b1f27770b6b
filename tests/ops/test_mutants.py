"""Negative controls: faulty operators, most of them with faults that similar implementations have had.

A named check detects each fault, on the default path of a CPU, which is the compiled kernel, and in plain PyTorch. The
checks are those that the tests call; all other tests show that they pass on the real implementation.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from . import checks, next_token_cases
from .cases import Case, random_case
from .conftest import skip_unless_built
from .fused_cases import fused, random_fused
from .fused_rounding import assert_within_rounding
from .mutants import Mutant
from .rounding import assert_within_one_rounding

PACK = random_case(2, lengths=checks.LENGTHS, rows=1)
SEQUENCES = random_case(3, rows=1)
MASKS = ((0, 1, 1, 1), (1, 1, 1, 1), (1, 1, 0, 0))
HOLES = ((1, 0, 1, 1), (1, 1, 0, 1))

Check = Callable[[str], None]


def parity(case: Case) -> Check:
    return partial(assert_within_one_rounding, case, through_state=True)


def check_pieces(backend: str) -> None:
    checks.check_pieces_are_the_whole(SEQUENCES, backend, [3, 7])


def check_numbered_documents(backend: str) -> None:
    case = random_case(5, 1, 5, seq_idx=[[0, 0, 1, 1, 1]])
    checks.check_documents_do_not_touch(case, backend, [slice(0, 2), slice(2, 5)], -29.0)


def check_identity(backend: str) -> None:
    keys = torch.tensor([torch.inf, -0.0, 3.0]).reshape(1, 3, 1, 1).expand(2, 3, 3, 5)
    checks.check_identity_returns_every_bit(replace(random_case(5, 2, 3), k=keys, v=keys), backend)


def check_inputs(backend: str) -> None:
    checks.check_inputs_are_left_alone(random_case(13, rows=1), backend)


def check_blocks(backend: str) -> None:
    """Cut a sequence that is longer than a block into pieces."""
    case = random_case(17, 1, 2**14, heads=1, k_dim=33, v_dim=1)
    checks.check_pieces_are_the_whole(case, backend, [2**13])


@torch.no_grad()
def check_identity_of_one_token(backend: str) -> None:
    case = random_case(41, 2, 1, rows=1).map(lambda x: torch.full_like(x, torch.inf))
    checks.check_identity_returns_every_bit(case, backend)


@torch.no_grad()
def check_one_token(backend: str) -> None:
    case = random_fused(13, 3, 1, rows=1, tables=3)
    assert_within_rounding(case, lambda case: fused(case, backend)[:3], unit=torch.finfo(case.k.dtype).eps)


@torch.no_grad()
def check_next_token_of_infinities(backend: str) -> None:
    case = random_fused(13, 3, 1, rows=1, tables=3)
    case.alpha[:] = torch.tensor([1.0, 0.0])
    finite = fused(case, backend)[1]
    case.k_state.fill_(torch.inf)
    assert torch.equal(fused(case, backend)[1], finite)


def check_one_call(backend: str) -> None:
    """Several sequences with tables of their own, norms, zeros in the coefficients, heads of 11 vectors."""
    for dtype in (torch.float32, torch.bfloat16):
        options = {"dtype": dtype, "batch": 3, "tables": 3, "size": 88, "v_size": 9, "norm": True, "zeros": True}
        next_token_cases.check(next_token_cases.Case(**options))
        next_token_cases.check(next_token_cases.Case(**options, counted=True))
        next_token_cases.check(next_token_cases.Case(**options | {"zeros": False}))


def check_a_full_cache(backend: str) -> None:
    for counted in (False, True):
        with contextlib.suppress(IndexError):
            next_token_cases.by_kernel(next_token_cases.Case(tokens=3, room=2, counted=counted))
            raise AssertionError("a token beyond the end")


check_parity = parity(SEQUENCES)
check_packs = partial(checks.check_pack_is_its_sequences, PACK, lengths=checks.LENGTHS)
check_as_many_sequences_as_tokens = partial(
    checks.check_pack_is_its_sequences, random_case(7, lengths=[3, 0, 0], rows=1), lengths=[3, 0, 0]
)
check_crop = partial(checks.check_cropped_tokens_were_never_seen, tokens=2, window=2)
check_padding = partial(checks.check_padding_is_as_if_absent, masks=MASKS, rows=1, pad=31.0)
check_holes = partial(check_padding, masks=HOLES)
check_pads_of_nan = partial(check_padding, pad=torch.nan)
check_a_token_after_three = parity(random_case(37, 2, 1, window=3, rows=3))
check_bfloat16 = parity(random_case(11, dtype=torch.bfloat16))
check_documents_with_a_state = parity(random_case(31, 1, 5, seq_idx=[[0, 0, 1, 1, 1]], rows=1))
check_sums = parity(random_case(17, 1, 150, heads=1, k_dim=1, v_dim=2))
check_strides = parity(random_case(29, layout="heads first"))
check_wide_heads = parity(random_case(19, 1, 3, k_dim=67, v_dim=33))
check_wide_window = parity(random_case(23, 1, 6, window=4, rows=4))


# The mutants by file: the right text, the wrong text, and the check that detects it.

Table = dict[str, dict[str, tuple[str, str, Check]]]
SHIFT, PLAN, STATE, EAGER, KERNEL = "shift.py", "boundaries.py", "state.py", "torch_ops.py", "cpu/kernel.cpp"
NEXT_TOKEN = "cpu/next_token.h"
CALL = "shift(x, coefficients, state, plan)"  # the call of the backend
LAST = "        return y, state_after("
NEXT = "state_after(x, state, plan, max_rows)"
FIRST = "first_BT = bound_rank[:, sequence_T]"
RETURN = "    return ShiftPlan(sources.int()"
CROP = "return self._map(lambda x: x[:, :remaining].clone())"

OF_BOTH: Table = {
    SHIFT: {
        "state forgotten": (CALL, "shift(x, coefficients, torch.zeros_like(state), plan)", check_pieces),
        "prefill from zeros": (
            CALL,
            "shift(x, coefficients, state if x.shape[1] == 1 else torch.zeros_like(state), plan)",
            check_pieces,
        ),
        "lags swapped": (CALL, "shift(x, coefficients.flip(1), state, plan)", checks.check_hand_worked_values),
        "heads swapped": (CALL, "shift(x, coefficients.flip(0), state, plan)", checks.check_hand_worked_values),
        "keys and values swap coefficients": (
            CALL,
            "shift(x, call.beta if x is call.k else call.alpha, state, plan)",
            checks.check_hand_worked_values,
        ),
        "coefficients in bf16": (CALL, "shift(x, coefficients.bfloat16(), state, plan)", check_parity),
        "gradient of the state missing": (CALL, "shift(x, coefficients, state.detach(), plan)", check_parity),
        "state is a view": (NEXT, "x[:, -max_rows:]", check_inputs),
        "keys edited in place": (LAST, f"        x.data.copy_(y)\n{LAST}", check_inputs),
        "state at the padded end": (NEXT, "x[:, -state.shape[1] :].clone()", check_padding),
        "no pad mask": ("**bounds, backward", '**bounds | {"mask": None}, backward', check_padding),
    },
    PLAN: {
        "pads counted as tokens": (
            "rank_BT = mask.cumsum(1) - 1",
            "rank_BT = position_T.expand(batch, -1)",
            check_holes,
        ),
        "boundaries ignored": (FIRST, "first_BT = bound_rank[:, sequence_T * 0]", check_packs),
        "decoding by coincidence": (  # a pack with as many tokens as sequences
            FIRST,
            f"{FIRST} if positions != cu_seqlens.shape[0] - 1 else rank_BT",
            check_as_many_sequences_as_tokens,
        ),
        "numbers of documents ignored": (
            "torch.where(document_starts(seq_idx, mask), rank_BT, 0).cummax(1).values",
            "torch.zeros_like(rank_BT)",
            check_numbered_documents,
        ),
        "one token emits no state": (RETURN, f"    next_BSR[end_BS - first_BS == 1] = NO_ROW\n{RETURN}", check_packs),
        "no token loses its state": (RETURN, f"    next_BSR[end_BS == first_BS] = NO_ROW\n{RETURN}", check_packs),
        "gradient across boundaries": (
            RETURN,
            f"    if readers is not None:\n        readers[:, slots:-1, 1] = position_T[1:]\n{RETURN}",
            check_packs,
        ),
    },
    STATE: {
        "state not reordered": ("return self.select(order)", "return self", checks.check_reordered_sequences_continue),
        "state reordered backwards": (
            "return self.select(order)",
            "return self.select(order.argsort())",
            checks.check_reordered_sequences_continue,
        ),
        "crop keeps the wrong row": (CROP, "return self._map(lambda x: x[:, tokens:].clone())", check_crop),
        "crop does nothing": (CROP, "return self", check_crop),
    },
}
OF_EAGER: Table = {
    EAGER: {
        "pads multiplied by zero": (
            "return torch.where(index[..., None, None] >= 0, x[batch, index.long().clamp(min=0)], 0)",
            "return x[batch, index.clamp(min=0)] * (index >= 0)[..., None, None]",
            check_pads_of_nan,
        ),
        "products rounded too": (
            "    dtype = compute_dtype(x)\n    coefficients_GW1",
            "    dtype = x.dtype\n    coefficients_GW1",
            check_bfloat16,
        ),
        "zero times infinity": ("if eager_on_cpu and not zero_GW1.any() else zero_GW1.unbind(1)", "", check_identity),
        "coefficients' gradient without the state": (
            "partial_sums[lag].append(product.sum((0, 1)))",
            "partial_sums[lag].append(product.sum((0, 1)) * (start + (span.start or 0) >= lag))",
            check_parity,
        ),
        "gradient not looking ahead": (
            "yield lag, slice(0, later.shape[1]), later",
            "yield lag, slice(0, later.shape[1]), later if lag == 0 else 0 * later",
            check_parity,
        ),
        "one token with the oldest row of the state": (
            "state[:, rows - lag + start : rows - lag + stop]",
            "state[:, lag - 1 : lag - 1 + stop - start]",
            check_a_token_after_three,
        ),
        "zero times infinity, one token": (
            "weight, zero = lags[lag]",
            "weight, zero = lags[lag].weight, None",
            check_identity_of_one_token,
        ),
        "blocks forget their neighbours": (
            "    window, rows = _cast(x[:, first:end], lags[0].weight), state.shape[1]\n",
            "    window, rows = _cast(x[:, first:end], lags[0].weight).clone(), state.shape[1]\n"
            "    window[:, : start - first] = 0\n",
            check_blocks,
        ),
    },
}
OF_AUTO: Table = {
    KERNEL: {
        "lags of the kernel swapped": (": t - j;", ": t - (n.W - 1 - j);", check_parity),
        "the oldest row of the state": (
            "row.add(call.state.at(b, n.Q + r), call.state.head, j)",
            "row.add(call.state.at(b, 0), call.state.head, j)",
            check_wide_window,
        ),
        "state read for nothing": (
            "else if (r >= -n.Q) row.add(call.state.at(b, n.Q + r), call.state.head, j)",
            "else row.add(call.state.at(b, r < -n.Q ? 0 : n.Q + r), call.state.head, j)",
            check_documents_with_a_state,
        ),
        "strides of heads ignored": (
            "row.add(call.x.at(b, r), call.x.head, j)",
            "row.add(call.x.at(b, r), n.D, j)",
            check_strides,
        ),
        "zero times infinity": ("return weights[lags[i]] != 0;", "return true;", check_identity),
        "cut off, not rounded": (
            "return bits + 0x7fff + ((bits >> 16) & 1);\n    }\n    static double",
            "return bits;\n    }\n    static double",
            check_bfloat16,
        ),
        "rest of a head left out": ("if (d < D) body(", "if (d < 0) body(", check_wide_heads),
        "gradient not looking ahead": (": t + j;", ": t;", check_parity),
        "gradient of the first row of the state": (
            "call.grad_state + (b * n.Q + r) * size",
            "call.grad_state + b * n.Q * size",
            check_wide_window,
        ),
        "coefficients' gradient without the state": (
            "read.at(b, t < 0 ? r : t), read.head",
            "call.x.at(b, t < 0 ? 0 : t), call.x.head",
            check_parity,
        ),
        "gradients of the coefficients swapped": (
            "with_p = sums[lags[0]], with_q = sums[lags[1]]",
            "with_p = sums[lags[1]], with_q = sums[lags[0]]",
            check_sums,
        ),
        "sums of the span before counted twice": (
            "std::memset(sums, 0,",
            "if (s == 0) std::memset(sums, 0,",
            check_sums,
        ),
    },
    NEXT_TOKEN: {
        "state not overwritten": (
            "std::memcpy(k_state, k_head, n.D",
            "std::memcpy(k_state, k_state, n.D",
            check_one_call,
        ),
        "state overwritten too early": (
            "        shift_head(k_head, k_state, n.alpha",
            "        std::memcpy(k_state, k_head, n.D * sizeof(T));\n        shift_head(k_head, k_state, n.alpha",
            check_one_call,
        ),
        "cache written elsewhere": ("n.keys.at(b, at)", "n.keys.at(b, at + 1)", check_one_call),
        "values written elsewhere": ("n.values.at(b, at)", "n.values.at(b, at - 1)", check_one_call),
        "cache written beyond its end": ("at >= n.room", "at > n.room", check_a_full_cache),
        "length not counted": ("if (n.length) ++*n.length;", "", check_one_call),
        "norm summed otherwise": ("i < whole ? i % groups : 0", "i % groups", check_one_call),
        "norm of keys forgotten": ("if (n.k_scale) norm", "if (false) norm", check_one_call),
        "tables of another row": ("tables.cos + b * ", "tables.cos + (n.B - 1 - b) * ", check_one_call),
        "rotated the other way": ("widen(sin[d]))", "-widen(sin[d]))", check_one_call),
        "zero coefficient of the previous token read": ("else if (b == 0)", "else if (false)", check_one_call),
        "zero coefficient of the token read": ("else if (a == 0)", "else if (false)", check_one_call),
        "values like keys": ("n.beta ? n.beta", "n.beta ? n.alpha", check_one_call),
        "one rounding too few": (
            "y[d] = rounded<T>(__builtin_fmaf(widen(state[d]), b, widen",
            "y[d] = (__builtin_fmaf(widen(state[d]), b, widen",
            check_one_call,
        ),
    },
    "cpu/next_token.py": {
        "gains swapped": ("q_gain, k_gain, self.eps = gains", "k_gain, q_gain, self.eps = gains", check_one_call),
        "tables of the first sequence alone": ("0 if self.sequences == 1 else self.size", "0", check_one_call),
    },
    "cpu/kernel.py": {
        "sums of the first span alone": ("sums.sum(0)", "sums[0]", check_sums),
    },
    "decode.py": {
        "one token without its state": (
            "previous, columns.previous, out",
            "0 * previous, columns.previous, out",
            check_one_token,
        ),
        "one token before itself": ("previous, columns.previous, out", "x, columns.previous, out", check_one_token),
        "next token, zero times infinity": ("if columns.none_is_zero:", "if True:", check_next_token_of_infinities),
        "one token without norm": (
            "q, k = call.norms[0](q), call.norms[1](k)\n    if",
            "q, k = call.norms[1](q), k\n    if",
            check_one_token,
        ),
    },
}


def mutants(table: Table, *backends: str) -> list[Any]:
    """Return test parameters: a `Mutant`, its check and the backend; mutants that need a new kernel build are slow."""
    return [
        pytest.param(
            Mutant(file, right, wrong), check, backend, id=f"{name}, {backend}", marks=SLOW if file == KERNEL else ()
        )
        for file, changes in table.items()
        for name, (right, wrong, check) in changes.items()
        for backend in backends
    ]


SLOW = pytest.mark.slow
MUTANTS = [*mutants(OF_BOTH, "auto", "eager"), *mutants(OF_EAGER, "eager"), *mutants(OF_AUTO, "auto")]


@pytest.mark.parametrize(("mutant", "check", "backend"), MUTANTS)
def test_a_mutant_is_caught(mutant, check, backend, tmp_path):
    if backend == "auto":
        skip_unless_built("cpu")
    if mutant.file in (KERNEL, NEXT_TOKEN) and shutil.which("g++") is None:
        pytest.skip("no compiler")
    check(backend)
    with mutant.in_place(tmp_path), pytest.raises(AssertionError):
        check(backend)
    check(backend)


@pytest.mark.slow
def test_a_kernel_that_is_built_from_the_same_text_passes(tmp_path):
    """The checks detect changed text, not that the kernel was rebuilt."""
    skip_unless_built("cpu")
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    with Mutant(KERNEL, "// The operator on a CPU", "// The operator on a CPU").in_place(tmp_path):
        for check in {
            check for _, check, backend in (parameters.values for parameters in MUTANTS) if backend == "auto"
        }:
            check("auto")
