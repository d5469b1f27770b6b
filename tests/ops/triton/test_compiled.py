"""The compiled Triton kernels, for the relevant GPU architectures, checked on a machine without a GPU.

Next to no local memory: at most the pair of registers that ptxas sometimes spills to run more threads at once, and
nothing that is indexed dynamically. No atomics, since the order of their sums would differ between runs, apart from the
counter of the next token. Wide loads and stores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..conftest import skip_unless_built

CALLS = {  # calls of one entry share a process, which takes 3 seconds to start
    (90, "plain"): [
        "plain, window 2, bfloat16",
        "plain, window 2, float64",
        "plain, keys, window 2, bfloat16",
        "plain, values, window 2, bfloat16",
        "plain, pack, window 4, float32",
        "plain, window 8, bfloat16",
    ],
    (90, "state"): [
        "state, window 4, float32",
        "state, window 8, float64",
        "state, values, window 2, bfloat16",
        "state, single, window 2, bfloat16",
    ],
    (90, "others"): [
        "documents, window 3, bfloat16",
        "padding, window 4, bfloat16",
    ],
    (90, "rotated"): [
        "rotated, window 2, bfloat16",
        "rotated, none, window 2, bfloat16",
        "rotated, norm, window 2, bfloat16",
        "rotated, keys, window 2, bfloat16",
        "rotated, values, norm, window 2, bfloat16",
        "rotated, norm, window 4, float32",
        "rotated, pack, norm, window 2, float64",
    ],
    (90, "heads"): [
        "plain, head 40, window 2, bfloat16",
        "plain, head 100, pack, window 2, bfloat16",
        "state, head 72, window 2, bfloat16",
        "rotated, norm, head 40, window 2, bfloat16",
        "rotated, norm, head 72, window 2, bfloat16",
    ],
    (90, "decode"): [
        "decode 1, window 2, bfloat16",
        "decode 4, window 2, float32",
        "decode 3, window 8, float16",
    ],
    (90, "next token"): [
        f"next token, {words}window 2, {dtype}"
        for words in ("", "norm, ", "static, ", "norm, static, ", "norm, head 72, ", "static, head 40, ")
        for dtype in ("bfloat16", "float32")
    ],
    **{
        (architecture, "plain, rotated, decode"): [
            "plain, window 2, bfloat16",
            "rotated, norm, window 2, bfloat16",
            "decode 1, window 2, bfloat16",
            "next token, norm, static, window 2, bfloat16",
            "next token, window 2, float32",
        ]
        for architecture in (80, 100)
    },
}


def compiled(architecture: int, calls: list[str]) -> list[dict[str, Any]]:
    """Run `compile_kernels.py` and return what it prints."""
    skip_unless_built("triton")
    pytest.importorskip("triton.backends.nvidia")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, str(Path(__file__).parent / "compile_kernels.py"), str(architecture), *calls]
    run = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind"), CALLS, ids=str)
def test_kernels_compile_without_spilling_and_atomics(architecture, kind):
    calls = CALLS[architecture, kind]
    found = compiled(architecture, calls)
    for call in calls:
        expected = {"next_token"} if call.startswith("next token") else {"forward", "backward"}
        expected = {"decode"} if call.startswith("decode") else expected
        assert {kernel["kernel"] for kernel in found if kernel["call"] == call} == expected, call
    for kernel in found:
        print(kernel["call"], {name: kernel[name] for name in ("kernel", "tile", "registers", "shared")})
        instructions = kernel["instructions"]
        assert kernel["local"] == 0, kernel
        assert kernel["stack"] <= 8, kernel
        atomics = [name for name in instructions if name.startswith(("ATOM", "RED."))]
        assert len(atomics) == ("static" in kernel["call"]), kernel  # one counts the programs of the next token
        if kernel["kernel"] in ("forward", "backward", "decode"):
            # Rows of 128 numbers move in 16 bytes per thread, others in 8; 16-bit numbers are never moved one by one.
            wide = (".128",) if kernel["kernel"] != "decode" and kind != "heads" else (".64", ".128")
            moves = [name for name in instructions if name.startswith(("LDG", "STG"))]
            assert {name[:3] for name in moves if any(width in name for width in wide)} == {"LDG", "STG"}, instructions
            assert not [name for name in moves if ".U16" in name or ".S16" in name], instructions
