"""Find the fastest `Tiling` of each Triton kernel on this device.

    python benchmarks/tilings.py [--out FILE] [--seconds S]

For every kernel of `kvshift.ops.triton.launch.TILING` it times candidates at the shapes of docs/performance.md and
prints the one whose worst slowdown over the shapes, relative to the best candidate at each shape, is smallest. The
result is to be entered into `TILING` by hand: a table that changes automatically would make two runs differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvshift.ops.arguments import TENSORS, Call
from kvshift.ops.triton.launch import TILING, Tiling

SHAPES = ((8, 4096, 20, 4, 128), (16, 2048, 16, 16, 64))
"""Shapes (B, T, H, G, D): grouped heads as in the paper's 2.9B, and as many KV heads as query heads."""


def candidates(kernel: str) -> Iterator[Tiling]:
    """Yield the tilings to try for one kernel, the current one first."""
    yield TILING[kernel]
    rotated = kernel.endswith("rotated")
    for elements, heads, warps in itertools.product(
        (1024, 2048, 4096) if rotated else (1024, 2048, 4096, 8192), (1, 4, 8) if rotated else (1,), (4, 8)
    ):
        tiling = Tiling(elements=elements, positions=128, heads=heads, warps=warps)
        if tiling != TILING[kernel]:
            yield tiling


def tune(
    device: torch.device,
    *,
    shapes: tuple[tuple[int, int, int, int, int], ...] = SHAPES,
    seconds: float = math.inf,
) -> dict[str, list[dict[str, Any]]]:
    """Time every candidate at every shape.

    Args:
        device: device of the tensors.
        shapes: shapes to time, in the form of `SHAPES`.
        seconds: time limit, after which no further candidate is started.

    Returns:
        For each kernel its candidates, the best first: the fields of the tiling, "seconds" by shape (None where it
        failed) and "behind", the largest ratio over shapes of its time to that of the best candidate.
    """
    end = time.monotonic() + seconds
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel, present in list(TILING.items()):
        runs = [_work(kernel, shape, device) for shape in shapes]
        rows: list[dict[str, Any]] = []
        try:
            for tiling in candidates(kernel):
                if time.monotonic() > end:
                    break
                TILING[kernel] = tiling
                rows.append({**asdict(tiling), "seconds": [_time(run) for run in runs]})
        finally:
            TILING[kernel] = present
        best = [min((row["seconds"][i] or math.inf for row in rows), default=math.inf) for i in range(len(shapes))]
        for row in rows:
            row["behind"] = max((s or math.inf) / least for s, least in zip(row["seconds"], best, strict=True))
        found[kernel] = sorted(rows, key=lambda row: row["behind"])
    return found


def _work(kernel: str, shape: tuple[int, int, int, int, int], device: torch.device) -> Callable[[], object]:
    """Return a function that launches the kernel once in bfloat16."""
    batch, positions, heads, groups, size = shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    k, v = normal(batch, positions, groups, size), normal(batch, positions, groups, size)
    alpha, beta = torch.rand(2, groups, 2, device=device).unbind()
    q = cos = sin = None
    if kernel.endswith("rotated"):
        q, (cos, sin) = normal(batch, positions, heads, size), normal(2, 1, positions, size // 2)
    inputs = Call(q, k, v, alpha, beta, cos=cos, sin=sin)[:TENSORS]
    if kernel.startswith("forward"):
        return lambda: torch.ops.kvshift.shift(*inputs, 0.0, 0)
    grads = (None if q is None else torch.randn_like(q), torch.randn_like(k), torch.randn_like(v))
    return lambda: torch.ops.kvshift.shift_backward(*grads, *inputs, 0.0)


def _time(run: Callable[[], object]) -> float | None:
    """Return the seconds of one launch by Triton's benchmark, or None if the launch fails on this device."""
    from triton.testing import do_bench

    try:
        return 1e-3 * cast(float, do_bench(run, warmup=5, rep=30, return_mode="median"))
    except Exception as error:  # for example too many registers: other candidates are tried
        print(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write with the times of all candidates")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no more candidates after this time")
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    found = tune(device, seconds=arguments.seconds)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "shapes": SHAPES}
        arguments.out.write_text(json.dumps({**about, "kernels": found}, indent=1) + "\n")
    for kernel, rows in found.items():
        present = next((row["behind"] for row in rows if Tiling(**_fields(row)) == TILING[kernel]), math.nan)
        best = Tiling(**_fields(rows[0])) if rows else "not reached"
        print(f"{kernel}: {best}; the current one takes {present:.2f} times as long as the best")


def _fields(row: dict[str, Any]) -> dict[str, int]:
    return {name: row[name] for name in asdict(Tiling())}


if __name__ == "__main__":
    main()
