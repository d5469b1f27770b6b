"""A report on this installation, to paste into an issue: `python -m kvshift [--test]`.

It says which versions and devices there are, and which backend a call takes and why. With --test, the backends of each
device are compared with the reference (`kvshift.ops.comparison`). The exit code is 1 if a part of the report could not
be made, or a result is wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvshift

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "vllm", "torchtitan", "kvshift-lab")
_VARIABLES = ("KVSHIFT_", "TRITON_", "CUDA_", "OMP_", "PYTORCH_", "TORCH")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def main(arguments: list[str] | None = None) -> int:
    """Print the report part by part, the first one before torch is imported; an exception becomes a line of it."""
    parser = argparse.ArgumentParser(prog="python -m kvshift", description="Report on this installation of kvshift.")
    parser.add_argument(
        "--test",
        action="store_true",
        help="also compare the kernels with the reference: seconds on a CPU, about a minute of compilation on a GPU",
    )
    parts: dict[str, Callable[[], Iterable[str]]] = {
        "versions": _versions,
        "environment": lambda: [f"{x}={os.environ[x]}" for x in sorted(os.environ) if x.startswith(_VARIABLES)],
        "devices": _devices,
        "backends": _backends,
    }
    if parser.parse_args(arguments).test:
        parts["comparison with the reference"] = _comparisons
    failed = False
    for title, lines in parts.items():
        print(title)
        try:
            for line in lines():
                print(f"  {line}", flush=True)
        except Exception as error:  # a broken installation may raise anything
            print(f"  {traceback.format_exception_only(error)[0].splitlines()[0]}")
            failed = True
    return int(failed)


def _versions() -> Iterator[str]:
    yield f"kvshift {kvshift.__version__}, {Path(kvshift.__file__).parent}"
    yield f"python {platform.python_version()}, {sys.executable}"
    yield platform.platform()
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} is not installed"


def _all_devices() -> list[Any]:
    import torch

    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def _devices() -> Iterator[str]:
    import torch

    from kvshift.ops.cpu import kernel
    from kvshift.ops.triton.call import triton_unsupported_reason

    instructions, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    yield f"cpu: {platform.machine()}, {instructions}, {os.cpu_count()} cores, {threads} threads of torch"
    missing = kernel.cpu_unsupported_reason(torch.empty(0), 2)
    yield f"cpu: {missing or 'the kernel was built, and it loads'}"
    note = Path(kernel.__file__).with_name("_kernel.build.txt")
    if missing and note.exists():  # why it was not built, with the compiler's last lines
        yield from note.read_text(encoding="utf-8", errors="replace").splitlines()
    for device in _all_devices()[1:]:
        gpu = torch.cuda.get_device_properties(device)
        runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
        yield f"{device}: {gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB, {runtime}"
        yield f"{device}: {triton_unsupported_reason(torch.empty(0, device=device), 2) or 'kernels can be launched'}"


def _backends() -> Iterator[str]:
    """Yield the implementation that backend "auto" takes for each kind of call, and the reason if it is a slow one."""
    import torch

    from kvshift.ops.arguments import Call
    from kvshift.ops.cpu import next_token as cpu
    from kvshift.ops.cpu.kernel import cpu_unsupported_reason
    from kvshift.ops.dispatch import choose_backend, fused_path, shift_path
    from kvshift.ops.triton import next_token as triton
    from kvshift.ops.triton.call import triton_unsupported_reason

    def implementation(device: Any, dtype: str, positions: int, rotates: bool) -> str:
        k = torch.zeros(1, positions, 1, 64, dtype=getattr(torch, dtype), device=device)
        coefficients, table = torch.ones(1, 2, device=device), torch.ones(1, positions, 1, 32, device=device)
        rows = k if positions == 1 else None
        call = Call(None, k, k, coefficients, coefficients, rows, rows, max_rows=1)
        path = fused_path(call._replace(q=k, cos=table, sin=table)) if rotates else "unfused"
        if path == "launch":
            return "triton, with rotary embedding in the same launch"
        if path == "next token" and k.dtype in (cpu if k.is_cpu else triton).next_token_dtypes():
            one = "call of the compiled kernel" if k.is_cpu else "launch of a Triton kernel"
            return f"one {one} in models of the Llama, Mistral, Qwen and Baichuan-M1 families"
        if path == "next token":
            return "a few plain operations, because preparing a launch takes longer"
        path = shift_path(call)
        if choose_backend("auto") != "auto":
            return f"{path}, because of KVSHIFT_BACKEND={choose_backend('auto')}"
        reason = (cpu_unsupported_reason if k.is_cpu else triton_unsupported_reason)(k, 2)
        return f"{path}, because of the kernels: {reason}" if path == "eager" and reason else path

    calls = {
        "kv_shift": (16, False),
        "attention in training or for a prompt": (16, True),
        "attention for the next token": (1, True),
    }
    for device in _all_devices():
        for name, (positions, rotates) in calls.items():
            taken: dict[str, list[str]] = {}
            for dtype in _DTYPES:
                with torch.set_grad_enabled(positions > 1):
                    taken.setdefault(implementation(device, dtype, positions, rotates), []).append(dtype)
            yield from (f"{device}, {name}, {', '.join(dtypes)}: {path}" for path, dtypes in taken.items())


def _comparisons() -> Iterator[str]:
    from kvshift.ops.comparison import compare_backends

    for device in _all_devices():
        yield from compare_backends(device)


if __name__ == "__main__":
    sys.exit(main())
