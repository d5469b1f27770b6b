"""Part "op": the operator, forward alone and with its backward pass, with k and v together as a user calls it.

The lower bound is the bytes that must move. Forward reads k and v and writes as many bytes. Backward reads the incoming
gradients, reads k and v for the gradients of the coefficients, and writes the gradients of k and v. Forward alone moves
2 times the bytes of k and v, both passes move 5 times, and a copy moves 2 times. Coefficients and state are negligible.

Shapes: B batch, T positions, G KV heads, D head size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvshift_lab.benchmarks.activation_memory import bytes_saved
from kvshift_lab.benchmarks.cases import Case, Implementation, LeftOutError, Session
from kvshift_lab.benchmarks.formulations import (
    Formulation,
    Table,
    formulations_with_rotary,
    formulations_without_rotary,
    kv_shift_function,
    rotary_tables,
)
from kvshift_lab.benchmarks.parity import check_formulation

COPY = "copy of k and v"
_PASSES = {"forward": 2, "forward and backward": 5}  # bytes moved / bytes of k and v
_MAX_SETS = 32


@dataclass(frozen=True)
class _Inputs:
    k: Tensor
    v: Tensor
    grad_k: Tensor
    grad_v: Tensor
    source: Tensor  # as many bytes as k and v
    target: Tensor


def op_cases(session: Session) -> Iterator[Case]:
    """Yield a case for each shape and dtype of the preset, without and with the rotary embedding of k."""
    preset = session.preset
    for shape, dtype, what in itertools.product(preset.shapes, preset.dtypes, _PASSES):
        yield shift_case(session, "op", shape, dtype, what)
        yield shift_case(session, "op", shape, dtype, what, rotary=True)


def shift_case(
    session: Session,
    part: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    what: str,
    *,
    rotary: bool = False,
    only_kv_shift: bool = False,
    **facts: Any,
) -> Case:
    """Return the case of all implementations at one shape, with a copy as the baseline.

    Args:
        shape: (B, T, G, D) of k and of v.
        what: "forward" or "forward and backward".
        rotary: include the rotary embedding of k.
        only_kv_shift: measure only `kv_shift` and the copy.
        facts: further fields of the rows.
    """
    name = f"{shape} {_short(dtype)} {what}" + (", rotary" if rotary else "")

    def build() -> dict[str, Callable[[], Implementation]]:
        torch.compiler.reset()  # torch.compile stops compiling a code object after a few shapes
        sets = _inputs(shape, dtype, session.device)
        table = rotary_tables(shape[1], shape[3], dtype, session.device) if rotary else None
        if table is not None:
            formulations = formulations_with_rotary(table, session.compiled)
        elif only_kv_shift:
            formulations = [Formulation(name="kv_shift", function=kv_shift_function("auto"))]
        else:
            formulations = formulations_without_rotary(sets[0].k, session.compiled)
        moved_bytes = 2 * sets[0].k.nbytes
        implementations: dict[str, Callable[[], Implementation]] = {
            COPY: functools.partial(_copy, sets, 2 * moved_bytes)
        }
        for formulation in formulations:
            implementations[formulation.name] = functools.partial(
                _implementation, formulation, sets, dtype, what, _PASSES[what] * moved_bytes, table
            )
        return implementations

    facts = {"shape": list(shape), "dtype": _short(dtype), "pass": what, "rotary": rotary, **facts}
    clock = session.device_clock
    return Case(part=part, name=name, baseline=COPY, build=build, facts=facts, clock=clock, rounds=session.rounds)


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[_Inputs]:
    """Return sets of inputs that calls use in turn; on a GPU, enough sets that none is still in its L2 cache."""
    size = math.prod(shape) * dtype.itemsize
    count = 1
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        count = min(_MAX_SETS, max(2, math.ceil(3 * cache / (2 * size)) + 1))
    generator = torch.Generator(device).manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return [
        _Inputs(
            draw().requires_grad_(),
            draw().requires_grad_(),
            draw(),
            draw(),
            torch.ones(2 * math.prod(shape), dtype=dtype, device=device),
            torch.empty(2 * math.prod(shape), dtype=dtype, device=device),
        )
        for _ in range(count)
    ]


def _copy(sets: list[_Inputs], moved_bytes: int) -> Implementation:
    def run(number: int) -> None:
        chosen = sets[number % len(sets)]
        chosen.target.copy_(chosen.source)

    return Implementation(run=run, moved_bytes=moved_bytes)


def _implementation(
    formulation: Formulation, sets: list[_Inputs], dtype: torch.dtype, what: str, moved_bytes: int, table: Table | None
) -> Implementation:
    if formulation.left_out is not None:
        raise LeftOutError(formulation.left_out)
    first = sets[0].k
    device, shape = first.device, (first.shape[0], first.shape[1], first.shape[2], first.shape[3])
    torch.manual_seed(0)
    backward = what != "forward"
    weights = [formulation.weights(torch.rand(shape[2], 2, device=device), first.detach()).detach() for _ in range(2)]
    trained = weights if formulation.fixed is None else []
    for weight in trained:
        weight.requires_grad_()

    def forward(number: int) -> tuple[Tensor, Tensor]:
        chosen = sets[number % len(sets)]
        return formulation.function(chosen.k, chosen.v, *weights)

    def run_forward(number: int) -> None:
        with torch.no_grad():
            forward(number)

    def run_both(number: int) -> None:
        chosen = sets[number % len(sets)]
        leaves = (chosen.k, chosen.v, *trained)
        torch.autograd.grad(forward(number), leaves, (chosen.grad_k, chosen.grad_v))

    def check() -> dict[str, Any]:
        verdict = check_formulation(formulation, shape, dtype, device, backward=backward, table=table)
        return {"problem": verdict.problem, "worst_error": verdict.worst}

    def saved() -> int:
        return bytes_saved(lambda: forward(0), device)

    facts = {} if formulation.computes is None else {"computes": formulation.computes}
    return Implementation(
        run=run_both if backward else run_forward,
        check=check,
        moved_bytes=moved_bytes,
        saved=saved if backward else None,
        facts=facts,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
