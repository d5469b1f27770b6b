"""`kvshift doctor`: versions, devices, kernels, the backend of each kind of call, and the operator's edge suite.

Each part is printed as soon as it is known, the first one before torch is imported. An exception becomes a line of the
report.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

import kvshift
from kvshift_lab.analysis.tables import as_text
from kvshift_lab.core.errors import CheckFailedError, LabError
from kvshift_lab.doctor.doctor_config import DoctorConfig

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "vllm", "numpy")
_VARIABLES = ("KVSHIFT_", "TRITON_", "CUDA_", "OMP_", "PYTORCH_", "TORCH")  # prefixes of relevant variables
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def doctor(config: DoctorConfig) -> None:
    """Print the report.

    Raises:
        LabError: if the device does not exist.
        CheckFailedError: if a part of the report could not be made, or a result of the edge suite is wrong.
    """
    wrong: list[str] = []
    report: dict[str, Any] = {}
    parts: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "environment": lambda: {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)},
        "devices": lambda: {str(device): _describe(device) for device in _devices(config.device)},
        "kernels": lambda: _kernels(config.device),
        "backends": lambda: _backends(config.device, wrong),
        "edge suite": lambda: _edge_suite(config.device, wrong),
    }
    for name, part in parts.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            report[name] = _attempt(part, name, wrong)
        messages = list(dict.fromkeys(str(warning.message) for warning in warned))
        if messages:
            report[f"{name}, warnings"] = messages
        if not config.json:
            print(*(_as_text(key, report[key]) for key in report if key.startswith(name)), sep="\n", flush=True)
    report["wrong"] = wrong
    print(json.dumps(report, indent=1) if config.json else _as_text("wrong", wrong or "nothing"))
    if wrong:
        raise CheckFailedError(f"faults found: {len(wrong)}; please report this output at {_issues_url()}")


def _attempt(function: Callable[[], Any], name: str, wrong: list[str]) -> Any:
    """Return the result of a function. If it raises, add the error to `wrong` and return it, in one line."""
    try:
        return function()
    except LabError:
        raise
    except Exception as error:  # a broken installation may raise anything
        line = traceback.format_exception_only(error)[0].splitlines()[0]
        wrong.append(f"{name}: {line}")
        return line


def _as_text(name: str, found: Any) -> str:
    """Format a part of the report for the terminal."""
    if isinstance(found, dict):
        width = max(map(len, found), default=0)
        texts = {key: str(value).replace("\n", "\n" + " " * (width + 4)) for key, value in found.items()}
        lines = [f"{key:<{width}}  {text}" for key, text in texts.items()]
    elif isinstance(found, list) and found and isinstance(found[0], dict):
        lines = as_text([tuple(found[0]), *(tuple(map(str, row.values())) for row in found)], left=None).splitlines()
    else:
        lines = found if isinstance(found, list) else [found]
    return "\n".join([name, *(f"  {line}" for line in lines or ["none"]), ""])


def _versions() -> dict[str, str]:
    found = {
        "kvshift": f"{kvshift.__version__}, {Path(kvshift.__file__).parent}",
        "python": f"{platform.python_version()}, {sys.executable}",
        "platform": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _issues_url() -> str:
    try:
        urls = dict(url.split(", ", 1) for url in metadata("kvshift").get_all("Project-URL") or ())
        return urls["Issues"]
    except (PackageNotFoundError, KeyError, ValueError):  # a checkout that is not installed
        return "the project's issue tracker"


def _devices(name: str) -> list[Any]:
    import torch

    if name == "auto":
        return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    try:
        return [torch.empty(0, device=name).device]
    except Exception as error:  # RuntimeError, AssertionError, AcceleratorError
        raise LabError(f"device must exist on this machine, got {name!r}: {str(error).splitlines()[0]}") from error


def _describe(device: Any) -> str:
    import torch

    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
        return f"{found.name}, capability {found.major}.{found.minor}, {found.total_memory / 2**30:.0f} GiB, {runtime}"
    if device.type != "cpu":
        return device.type
    from kvshift_lab.core.environment import environment

    found = environment(device, processes=1)["hardware"]
    return f"{found['cpu']}, {found['instructions']}, {found['cores']} cores, {found['threads']} threads of torch"


def _kernels(name: str) -> dict[str, str]:
    """Return for each device whether its kernels can be used; if not, the reason."""
    import torch

    from kvshift.ops.cpu import kernel
    from kvshift.ops.triton.call import triton_unsupported_reason

    found = {}
    for device in _devices(name):
        x = torch.empty(0, device=device)
        if device.type == "cpu":
            refusal = kernel.cpu_unsupported_reason(x, 2)
            note = Path(kernel.__file__).with_name("_kernel.build.txt")
            if refusal is not None and note.exists():
                refusal += "\n" + note.read_text(encoding="utf-8", errors="replace").strip()
            found["cpu kernel"] = "built, and it loads" if refusal is None else f"missing: {refusal}"
        found[f"triton on {device}"] = triton_unsupported_reason(x, 2) or "kernels can be launched"
    return found


def _backends(name: str, wrong: list[str]) -> list[dict[str, str]]:
    """Return the implementation that the backend "auto" selects for each kind of call."""
    rows: list[dict[str, str]] = []
    for device in _devices(name):
        for dtype in _DTYPES:
            for call, decide in _calls(device, dtype).items():
                takes = _attempt(decide, f"backends: {call}, {dtype} on {device}", wrong)
                why = _attempt(partial(_why, takes, device, dtype, call), "backends", wrong)
                row = {"device": str(device), "call": call, "dtype": dtype, "backend": takes, "why": why}
                same = [r for r in rows if {**r, "dtype": ""} == {**row, "dtype": ""}]
                if same:
                    same[0]["dtype"] += f", {dtype}"
                else:
                    rows.append(row)
    return rows


def _why(takes: str, device: Any, dtype: str, call: str) -> str:
    import torch

    from kvshift.ops.cpu.kernel import cpu_unsupported_reason
    from kvshift.ops.triton.call import triton_unsupported_reason

    if os.environ.get("KVSHIFT_BACKEND", "auto") != "auto":
        return f"KVSHIFT_BACKEND={os.environ['KVSHIFT_BACKEND']}"
    if takes.startswith(("cpu", "triton")):
        return "its kernels can take the tensors"
    if takes == "plain operations":
        return "preparing a kernel launch would take longer"
    if takes != "eager":  # an error message
        return "-"
    if device.type == "cpu" and "compiled" in call:
        return "torch.compile fuses its operations"
    x = torch.empty(0, dtype=getattr(torch, dtype), device=device)
    unsupported_reason = triton_unsupported_reason if device.type == "cuda" else cpu_unsupported_reason
    return unsupported_reason(x, 2) or "-"


def _calls(device: Any, dtype: str) -> dict[str, Callable[[], str]]:
    """Return a function for each kind of call, which returns the implementation that `kvshift.ops.dispatch` selects."""
    import torch

    from kvshift.ops.arguments import Call
    from kvshift.ops.dispatch import fused_path, shift_path

    def numbers(*shape: int) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    def make(positions: int, state: bool = False) -> Any:
        k, coefficients = numbers(1, positions, 1, 64), torch.ones(1, 2, device=device)
        rows = numbers(1, 1, 1, 64) if state else None
        return Call(None, k, k, coefficients, coefficients, rows, rows, max_rows=1)

    def shift() -> str:
        return shift_path(make(16))

    def attention(positions: int, state: bool = False) -> str:
        call, table = make(positions, state), torch.ones(1, positions, 1, 32, device=device)
        path = fused_path(call._replace(q=call.k, cos=table, sin=table))
        if path == "launch":
            return "triton, with rotary embedding in the same launch"
        return "plain operations" if path == "next token" else shift_path(call)

    def next_token() -> str:
        with torch.no_grad():
            return attention(1, state=True)

    def compiled(function: Callable[[], str]) -> str:
        return torch.compile(function, backend="eager", fullgraph=True)()

    return {
        "kv_shift": shift,
        "attention, training or prefill": partial(attention, 16),
        "attention, next token": next_token,
        "attention, training, compiled": partial(compiled, partial(attention, 16)),
    }


def _edge_suite(name: str, wrong: list[str]) -> list[dict[str, str]]:
    import torch

    from kvshift_lab.doctor.edge_suite import edge_suite

    return edge_suite(_devices(name), [getattr(torch, dtype) for dtype in _DTYPES], wrong)
