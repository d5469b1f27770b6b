"""The operator's edge suite: edge cases on all backends, compared with the reference in float64 on the CPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvshift.ops import ShiftState, kv_shift
from kvshift.ops.cpu.kernel import cpu_unsupported_reason
from kvshift.ops.triton.call import triton_unsupported_reason
from kvshift_lab.doctor.small_calls import HEADS, Edge, Kind, difference, outcome

_K_SIZE, _V_SIZE = 20, 19  # longer than a vector register of the CPU, and not a multiple of its length

# The index of a token's predecessor does not depend on the dtype, and Triton compiles new kernels for nearly every
# edge: with Triton, dtypes other than bfloat16 are tested only on these edges.
_FOR_EACH_DTYPE = {"first token", "state", "padded documents", "zero coefficients", "inference"}

_DOCUMENTS = [[0, 0, 1, 1, 1, 2, 3], [5, 4, 4, 4, 4, 4, 5]]
_HOLES = [[0, 1, 0, 0, 1, 1, 0], [1, 0, 1, 1, 0, 1, 1]]

EDGES = {
    "first token": Edge(),
    "state": Edge(has_state=True),
    "no token": Edge(positions=0, has_state=True),
    "one token": Edge(positions=1, has_state=True),
    "packed documents": Edge(1, cu_seqlens=[0, 3, 3, 4, 7], has_state=True),
    "numbered documents": Edge(seq_idx=_DOCUMENTS, has_state=True),
    "left padding": Edge(mask=[[0, 0, 0, 1, 1, 1, 1], [0] * 7], has_state=True),
    "right padding": Edge(mask=[[1, 1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]], has_state=True),
    "padding inside": Edge(mask=_HOLES),
    "padded documents": Edge(seq_idx=_DOCUMENTS, mask=_HOLES),
    "strides": Edge(strided=True),
    "zero coefficients": Edge(has_zeros=True),
    "inference": Edge(seq_idx=_DOCUMENTS, mask=_HOLES, has_state=True, inference=True),
}


def split_fault(kind: Kind, backend: str) -> str | None:
    """Return a line if a sequence in two pieces or in single tokens does not give the bits of the whole, else None."""
    k, v, alpha, beta = _sequence(kind)
    *whole, last = kv_shift(k, v, alpha, beta, backend=backend)
    length = k.shape[1]
    for sizes in [(first, length - first) for first in range(length + 1)] + [(1,) * length]:
        state, parts = None, []
        for k_part, v_part in zip(k.split(sizes, 1), v.split(sizes, 1), strict=True):
            *part, state = kv_shift(k_part, v_part, alpha, beta, state=state, backend=backend)
            parts.append(part)
        joined = [torch.cat(each, 1) for each in zip(*parts, strict=True)]
        if state != last or not all(map(torch.equal, joined, whole)):
            return f"pieces of {sizes} tokens do not give the same bits as the whole sequence"
    return None


def rollback_fault(kind: Kind, backend: str) -> str | None:
    """Return a line if tokens that were removed by `crop` affect the next token, else None."""
    k, v, alpha, beta = _sequence(kind)
    begin = ShiftState.zeros(
        1, HEADS, kind.k_size, kind.v_size, rows=kind.window + 1, dtype=kind.dtype, device=kind.device
    )

    def feed(state: ShiftState, span: slice) -> tuple[Tensor, Tensor, ShiftState]:
        return kv_shift(k[:, span], v[:, span], alpha, beta, state=state, backend=backend)

    straight = feed(feed(begin, slice(2))[2], slice(4, 5))
    rejected = feed(begin, slice(4))[2].crop(2, window=kind.window)
    again = feed(rejected, slice(4, 5))
    if not all(map(torch.equal, straight[:2], again[:2])):
        return "after a roll-back of two tokens, the next token differs from the result without them"
    return None


FAULTS = {"every split": split_fault, "state rolled back": rollback_fault}


def _sequence(kind: Kind) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return k, v, alpha and beta of a sequence of 5 tokens."""
    normal = torch.Generator().manual_seed(21)
    shapes = [(1, 5, HEADS, size) for size in (kind.k_size, kind.v_size)]
    k, v = (torch.randn(shape, generator=normal).to(kind.device, kind.dtype) for shape in shapes)
    alpha, beta = (torch.randn(HEADS, kind.window, generator=normal).to(kind.device) for _ in "kv")
    return k, v, alpha, beta


def edge_suite(
    devices: Sequence[torch.device], dtypes: Sequence[torch.dtype], wrong: list[str]
) -> list[dict[str, str]]:
    """Return the number of edges with right results, by device, backend and kind of call.

    Args:
        devices: devices to test.
        dtypes: dtypes of keys and values.
        wrong: list to which a line is added for each fault.
    """

    @cache
    def exact(edge: str, kind: Kind) -> dict[str, Any]:
        return outcome(EDGES[edge], kind, "reference", exact=True)

    def fault(edge: str, kind: Kind, backend: str) -> str | None:
        if edge in FAULTS:
            return FAULTS[edge](kind, backend)
        expected = exact(edge, kind._replace(device=torch.device("cpu")))
        return difference(outcome(EDGES[edge], kind, backend), expected, kind.dtype)

    rows = []
    refusals: dict[str, Callable[..., Any]] = {
        "cpu": cpu_unsupported_reason,
        "triton": triton_unsupported_reason,
        "eager": lambda *_: None,
    }
    for device in devices:
        for backend, refusal in refusals.items():
            if refusal(torch.empty(0, device=device), 2) is not None:
                continue
            kinds = [Kind(device, dtype, _K_SIZE, _V_SIZE, 2) for dtype in dtypes]
            if backend == "triton":
                kinds += [Kind(device, torch.bfloat16, _K_SIZE, _K_SIZE, 3, rotated=True, normed=True)]
            else:
                kinds += [kinds[0]._replace(window=3)]
            for kind in kinds:
                left_out: set[str] = {*FAULTS, "zero coefficients"} if kind.rotated else set()  # rotating inf gives NaN
                if backend == "triton" and kind.dtype != torch.bfloat16:
                    left_out |= {*EDGES, *FAULTS} - _FOR_EACH_DTYPE
                edges = [edge for edge in (*EDGES, *FAULTS) if edge not in left_out]
                faults: dict[str, list[str]] = {}
                for edge in edges:
                    try:
                        line = fault(edge, kind, backend)
                    except Exception as error:  # compilers and drivers may raise anything
                        line = traceback.format_exception_only(error)[0].splitlines()[0]
                    if line is not None:
                        faults.setdefault(line, []).append(edge)
                place = f"edge suite: {backend} on {device}, {kind}"
                wrong += [f"{place}, {', '.join(found)}: {line}" for line, found in faults.items()]
                right = f"{len(edges) - sum(map(len, faults.values()))} of {len(edges)}"
                rows.append({"device": str(device), "backend": backend, "kind": str(kind), "right": right})
    return rows
