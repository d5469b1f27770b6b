"""Measure how long the host takes to issue calls that compute little: training of a small layer, and the next token.

    python benchmarks/launches.py                       on a GPU: the time until a call has been issued
    python benchmarks/launches.py --out FOLDER/rows.jsonl
    python benchmarks/launches.py --instructions        without a GPU also instructions, by valgrind

On a machine without a GPU, Triton compiles the kernels for sm_90, and a stub in place of the driver returns at once
(`tests/ops/triton/stub_driver.py`). Tensors are on the CPU, with its allocator and operations. There, time is that of
the calling thread, of which other load on the machine takes no part.

Each number is the fastest of many short series. "without keeping" makes the same call when nothing is kept from earlier
ones, as before kernels were launched directly: Triton looks for the compiled kernel, and the call is checked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from kvshift import ShiftState, kv_shift
from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.rope import half_tables
from kvshift.ops.triton import compiled_launch
from kvshift.ops.triton.next_token import NextToken, TokenTables
from kvshift_lab.core.json_lines import write_lines

BATCH, POSITIONS, QUERIES, HEADS, SIZE = 2, 16, 32, 8, 128
SERIES, CALLS = 300, 4


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the calls by name, all in bfloat16 with 8 KV heads of 128 numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    shape = BATCH, POSITIONS, HEADS, SIZE
    q, k, v = normal(BATCH, POSITIONS, QUERIES, SIZE), normal(*shape), normal(*shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    weights = [nn.Parameter(normal(HEADS, 2, dtype=torch.float32)) for _ in "kv"]
    tables = half_tables(normal(1, POSITIONS, SIZE), normal(1, POSITIONS, SIZE))
    norms = nn.RMSNorm(SIZE, 1e-6, device=device), nn.RMSNorm(SIZE, 1e-6, device=device)
    gains = [norm.weight for norm in norms]
    upstream = [torch.randn_like(x) for x in (q, k, v)]

    def shift() -> Any:
        return kv_shift(k, v, *weights, backend="triton")[:2]

    def layer(norms: tuple[nn.Module, nn.Module] | None = None) -> Any:
        return shift_norm_rope(q, k, v, *weights, rotary=tables, norms=norms, keep_state=False, backend="triton")[:3]

    def token(length: Tensor | None = None) -> Callable[[], object]:
        state = ShiftState(normal(1, 1, HEADS, SIZE), normal(1, 1, HEADS, SIZE), 1)
        one = [normal(1, 1, heads, SIZE) for heads in (QUERIES, HEADS, HEADS)]
        tables = TokenTables(half_tables(normal(1, 1, SIZE), normal(1, 1, SIZE)))
        call = NextToken(*one, state, *weights)
        call.write_to(normal(1, HEADS, 256, SIZE), normal(1, HEADS, 256, SIZE), length)

        def checked() -> object:
            assert call.is_current(state, (weights[0], weights[1]), (None, None, 0.0))
            assert call.takes(*one, tables)
            return call(*one, tables, 7)

        return checked

    return {
        "kv_shift, forward": shift,
        "kv_shift, forward and backward": lambda: torch.autograd.grad(shift(), [*leaves[1:], *weights], upstream[1:]),
        "layer, forward": layer,
        "layer, forward and backward": lambda: torch.autograd.grad(layer(), [*leaves, *weights], upstream),
        "layer with QK-norm, forward": lambda: layer(norms),
        "layer with QK-norm, forward and backward": lambda: torch.autograd.grad(
            layer(norms), [*leaves, *weights, *gains], upstream
        ),
        "next token, dynamic cache": token(),
        "next token, static cache": token(torch.tensor(7, device=device)),
    }


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Let nothing be found that was kept from an earlier call."""
    found = {"get": lambda self, key: None, "__contains__": lambda self, key: False}
    with patch.multiple(compiled_launch.Kept, create=True, **found):
        yield


def fastest(call: Callable[[], object], device: torch.device) -> float:
    """Return the microseconds of a call in the fastest series."""
    clock = time.perf_counter_ns if device.type == "cuda" else time.thread_time_ns
    for _ in range(3):
        call()
    best = float("inf")
    for _ in range(SERIES):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock()
        for _ in range(CALLS):
            call()
        best = min(best, (clock() - start) / CALLS)
    return best / 1e3


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for each call as soon as it is measured; one for each call that fails."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "stub of the driver"
    common = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    for call, run in calls(device).items():
        row = {"call": call, **common}
        try:
            row["microseconds"] = fastest(run, device)
            if not call.startswith("next token"):
                with nothing_kept():
                    row["without keeping"] = fastest(run, device)
        except Exception as error:  # the others are measured
            row["problem"] = f"{type(error).__name__}: {error}"
        yield row


def instructions() -> None:
    """Print the instructions of each call: the mean of 4 in a process under valgrind."""
    path = str(Path(__file__).parent)
    setup = f"""
import sys
sys.path.insert(0, {path!r})
import launches
call = launches.stubbed()[{{!r}}]
for _ in range(8):
    call()
"""
    for name in calls(torch.device("cpu")):
        found = Timer("call()", setup=setup.format(name)).collect_callgrind(number=4, collect_baseline=False)
        print(f"{name:42} {found.counts() / 4e3:8.1f} thousand instructions", flush=True)


def stubbed() -> dict[str, Callable[[], object]]:
    """Return the calls with the stub in place of the driver."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.ops.triton.stub_driver import StubDriver

    StubDriver(Path(tempfile.mkdtemp()))
    return calls(torch.device("cpu"))


def main() -> None:
    """Print a line for each call, and write the rows to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON Lines file to write")
    parser.add_argument("--instructions", action="store_true", help="also count instructions, by valgrind")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        stubbed()
    found = []
    for row in rows(device):
        found.append(row)
        numbers = row.get("problem") or ", ".join(
            f"{row[name]:6.1f} us{'' if name == 'microseconds' else ' ' + name}"
            for name in ("microseconds", "without keeping")
            if name in row
        )
        print(f"{row['call']:42} {numbers}", flush=True)
        if options.out:
            write_lines(options.out, found)
    if options.instructions:
        instructions()


if __name__ == "__main__":
    main()
