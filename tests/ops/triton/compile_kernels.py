"""Compile the Triton kernels for GPUs that are not present, and print a line of JSON for each kernel.

    python tests/ops/triton/compile_kernels.py 90 "plain, window 2, bfloat16" "decode 1, window 2, bfloat16" ...

This needs a separate process, because Triton chooses between compiler and interpreter when it is imported. The calls
are operator calls on CPU tensors; a stub driver reports the GPU, and kernels are compiled, not launched.
"""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SIZES = {"B": 9, "T": 256, "H": 8, "G": 4, "D": 128}
# Words of a call: one of the first row; any of the second; if not both targets are shifted, which; and a head size.
WORDS = (
    ("plain", "state", "documents", "padding", "rotated"),
    ("pack", "norm"),
    ("keys", "values", "none", "single"),
    ("head 40", "head 72", "head 100"),
)


class Driver:
    """A stub driver that reports a GPU of this architecture and nothing else."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compiled_by(calls: Any) -> list[tuple[str, dict[str, Any], Any]]:
    """Return name, options and code of the kernels that `calls` would have launched."""
    from kvshift.ops.triton import backward as triton_backward
    from kvshift.ops.triton import call as triton_call
    from kvshift.ops.triton import forward as triton_forward
    from kvshift.ops.triton import launch as triton_launch

    found = []

    class Kernel:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                found.append((self.kernel.fn.__name__, options, self.kernel.warmup(*args, grid=grid, **options)))

            return launch

    stand_ins = SimpleNamespace(forward=Kernel(triton_forward.forward), backward=Kernel(triton_backward.backward))
    triton_launch.kernels = lambda: stand_ins
    triton_call._IS_INTERPRETED = True  # the stubs accept CPU tensors
    calls()
    return found


def call(words: list[str], window: int, dtype: torch.dtype) -> None:
    """Run forward, backward and the next state of the call that the WORDS describe."""
    from kvshift.ops import ShiftState, kv_shift, shift_tokens
    from kvshift.ops.arguments import Call
    from kvshift.ops.shift import with_plan
    from kvshift.ops.triton.call import shift_triton

    unknown = set(words).difference(*WORDS)
    assert not unknown, unknown
    B, T, H, G, D = SIZES.values()
    D = next((int(word.removeprefix("head ")) for word in words if word.startswith("head ")), D)
    pack = torch.tensor([0, 3, 3, 4, 5, 6, 7, 8, 100, T], dtype=torch.int32) if "pack" in words else None
    B = 1 if "pack" in words else B

    def numbers(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, requires_grad=True)

    q, k, v = numbers(B, T, H, D), numbers(B, T, G, D), numbers(B, T, G, D)
    alpha = None if {"values", "none"} & set(words) else numbers(G, window, dtype=torch.float32)
    beta = None if {"keys", "none"} & set(words) else numbers(G, window, dtype=torch.float32)
    tables = torch.ones(1, T, D // 2), torch.ones(1, T, D // 2)
    scales = {"q_scale": numbers(D), "k_scale": numbers(D)} if "norm" in words else {}
    if "rotated" in words:
        rotated = Call(q, k, v, alpha, beta, None, None, *tables, **scales, cu_seqlens=pack, eps=1e-6, max_rows=0)
        results = shift_triton(with_plan(rotated))[:3]
    elif "single" in words:
        results = shift_tokens(k, alpha, state=numbers(B, window, G, D), backend="triton")
    else:
        state = ShiftState(numbers(B, window, G, D), numbers(B, window, G, D), window) if "state" in words else None
        numbered = torch.zeros(B, T, dtype=torch.int64) if "documents" in words else None
        mask = torch.ones(B, T, dtype=torch.bool) if "padding" in words else None
        k_hat, v_hat, new = kv_shift(
            k, v, alpha, beta, state=state, cu_seqlens=pack, seq_idx=numbered, mask=mask, backend="triton"
        )
        results = (k_hat, v_hat, new.k, new.v)
    results = [x for x in results if x.requires_grad]
    torch.autograd.backward(results, [torch.ones_like(x) for x in results])


def decode(tokens_each: int, window: int, dtype: torch.dtype) -> tuple[str, dict[str, Any], Any]:
    """Compile the kernel that vLLM's decoding graphs contain, for pages of 64 tokens."""
    from kvshift.integrations.vllm_plugin import decode_kernel

    H, D = 2 * SIZES["G"], SIZES["D"]
    kv, of_int = torch.ones(H * D, dtype=dtype), torch.ones(H, dtype=torch.int32)
    options: dict[str, Any] = {
        "Q": tokens_each,
        "W": window,
        "H": H,
        "D": D,
        "TOKENS": 64,
        "ROWS": window - 1 + tokens_each - 1,
        "BLOCK": D,
        "SCAN": 256,
        "num_warps": 1,
    }
    tensors = (kv, kv, kv, torch.ones(H, window), torch.ones(H, dtype=torch.int64), of_int, of_int)
    numbers = (H, 2 * H * D, 128, 64 + options["ROWS"])
    return "decode", options, decode_kernel.decode.warmup(*tensors, *numbers, grid=(1, H), **options)


def next_token(words: list[str], dtype: torch.dtype) -> tuple[str, dict[str, Any], Any]:
    """Compile the kernel of the next token: "norm", "static" (with its length on the device), and a head size."""
    from kvshift.ops.triton.next_token_kernel import next_token

    B, _, H, G, D = SIZES.values()
    D = next((int(word.removeprefix("head ")) for word in words if word.startswith("head ")), D)
    numbers, weights = torch.ones(B, D, dtype=dtype), torch.ones(G, 2)
    gains = (numbers, numbers) if "norm" in words else (None, None)
    device = (torch.ones((), dtype=torch.int64), torch.ones((), dtype=torch.int32))
    options = {"H": H, "G": G, "D": D, "Dv": D, "EPS": 1e-6, "SIN": D // 2, "ALIGN": 16, "num_warps": 1}
    options |= {"BLOCK_K": 1 << (D // 2 - 1).bit_length(), "BLOCK_V": 1 << (D - 1).bit_length()}
    tensors = (
        *(numbers,) * 8,
        weights,
        weights,
        numbers,
        numbers,
        *gains,
        *(device if "static" in words else (None,) * 2),
    )
    return "next_token", options, next_token.warmup(*tensors, *(5,) * 6, grid=(1, 1), **options)


def report(name: str, options: dict[str, Any], kernel: Any) -> dict[str, Any]:
    """Return registers and bytes of local memory per thread, and the number of each instruction."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found is not None, usage
    instructions = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", code)
    return {
        "kernel": name,
        "tile": options.get("BLOCK_T"),
        **dict(zip(("registers", "stack", "shared", "local"), map(int, found.groups()), strict=True)),
        "instructions": collections.Counter(instructions),
    }


def main(architecture: str, *calls: str) -> None:
    from triton.runtime import driver

    driver.set_active(Driver(int(architecture)))
    for text in calls:
        *words, window, dtype = text.split(", ")
        arguments = words, int(window.removeprefix("window ")), getattr(torch, dtype)
        if words[0] == "next token":
            found = [next_token(words[1:], arguments[2])]
        elif words[0].startswith("decode "):
            found = [decode(int(words[0].removeprefix("decode ")), *arguments[1:])]
        else:
            found = compiled_by(lambda arguments=arguments: call(*arguments))
        for name, options, kernel in found:
            print(json.dumps({"call": text, **report(name, options, kernel)}), flush=True)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1"
    main(*sys.argv[1:])
