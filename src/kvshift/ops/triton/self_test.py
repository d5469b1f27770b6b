"""A self-test on the device, before "auto" first uses the Triton kernels for a kind of call.

Outputs, new states and gradients of the kernels must match plain operations in float64, within the tolerance of
`kvshift.ops.small_calls.difference`, for one document, packed documents, and documents with padding and a state. If any
of these raises or differs, there is one warning, and "auto" uses plain operations for the rest of the process. Later
calls of the same kind cost one dictionary lookup. KVSHIFT_SELF_TEST=0 disables the test.

The test runs in a separate thread, out of reach of the caller's autocast, saved-tensor hooks, modes and compiler.
torch.compile runs it while tracing; the compiled program, which is specific to these head sizes and this window, keeps
the result. The test cannot run while a CUDA graph is captured, nor in a backward pass, which its own backward pass
would wait for. An untested kind then uses plain operations in that call, and is tested at the next one.
"""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from kvshift.ops.small_calls import Edge

_SWITCH = os.environ.get("KVSHIFT_SELF_TEST", "1")
_POSITIONS = 67  # more than a tile has
_VERDICTS: dict[Kind, bool] = {}
_LOCK = threading.Lock()


class Kind(NamedTuple):
    """A kind of call, for which kernels are compiled.

    Attributes:
        k_size, v_size: head size of keys and of values.
        window: W; 1 if nothing is shifted.
        rotated, normed: whether the launch includes rotary embedding and QK-norm.
    """

    device: torch.device
    dtype: torch.dtype
    k_size: int
    v_size: int
    window: int
    rotated: bool = False
    normed: bool = False

    def __str__(self) -> str:
        sizes = self.k_size if self.k_size == self.v_size else f"{self.k_size} (values {self.v_size})"
        after = ", QK-norm" * self.normed + ", rotary embedding" * self.rotated
        return f"{str(self.dtype).removeprefix('torch.')}, head size {sizes}, window {self.window}{after}"


def passes_self_test(kind: Kind) -> bool:
    """Return True if "auto" may use the kernels for calls of this kind, testing them first if needed.

    Raises:
        ValueError: KVSHIFT_SELF_TEST is neither 0 nor 1.
    """
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        return _passes_while_tracing(*kind[:2], *(guard_scalar(n) for n in kind[2:5]), *kind[5:])
    verdict = _VERDICTS.get(kind)
    return _decide(kind) if verdict is None else verdict


def is_switched_on() -> bool:
    """Return True if kernels are tested before their first use.

    Raises:
        ValueError: KVSHIFT_SELF_TEST is neither 0 nor 1.
    """
    if _SWITCH not in ("0", "1"):
        raise ValueError(f"the environment variable KVSHIFT_SELF_TEST must be 0 or 1; got {_SWITCH!r}")
    return _SWITCH == "1"


def self_test_fault(kind: Kind) -> str | None:
    """Describe in one line what is wrong with the kernels for calls of this kind; None if nothing is."""
    from kvshift.ops.small_calls import difference, outcome

    try:
        for name, edge in _edges(kind.rotated).items():
            results = outcome(edge, kind, "triton")
            fault = difference(results, outcome(edge, kind, "eager", exact=True), kind.dtype)
            if fault is not None:
                return f"{name}: {fault}"
    except Exception as error:  # compilers and drivers raise exceptions of many types
        return traceback.format_exception_only(error)[0].splitlines()[0]
    return None


def _edges(rotated: bool) -> dict[str, Edge]:
    """Return the calls: few, as each compiles kernels. With a state, a launch that rotates has no gradients."""
    from kvshift.ops.small_calls import Edge

    positions = range(_POSITIONS)
    packed = [0, 40, 40, 41, 42, _POSITIONS]
    documents = [[t // 5 for t in positions], [t // 64 for t in positions]]
    mask = [[int(t % 7 != 3) for t in positions], [int(2 < t < 66) for t in positions]]
    edges = {
        "one document": Edge(positions=_POSITIONS),
        "a prompt": Edge(positions=_POSITIONS, inference=True),
        "packed documents": Edge(1, _POSITIONS, cu_seqlens=packed, has_state=not rotated),
        "padded documents": Edge(2, _POSITIONS, seq_idx=documents, mask=mask, has_state=True),
    }
    if rotated:
        edges["padded documents without a state"] = edges["padded documents"]._replace(has_state=False)
    else:
        edges["inference"] = edges["padded documents"]._replace(inference=True)
    return edges


def _passes_while_tracing(*kind: Any) -> bool:
    return _decide(Kind(*kind))


# Like `torch.compiler.assume_constant_result`, which would import torch._dynamo: seconds, even without compilation.
_passes_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _decide(kind: Kind) -> bool:
    if not is_switched_on():
        return _VERDICTS.setdefault(kind, True)
    with _LOCK:
        if kind in _VERDICTS:
            return _VERDICTS[kind]
        if not all(_VERDICTS.values()):
            return _VERDICTS.setdefault(kind, False)
        capturing = kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or torch._C._current_graph_task_id() != -1:
            return False
        fault = _in_a_thread(kind)
        _VERDICTS[kind] = fault is None
        if fault is not None:
            _VERDICTS.update(dict.fromkeys(_VERDICTS, False))
    if fault is not None:
        warnings.warn(
            f"the Triton kernels fail their self-test on {_device_name(kind.device)} ({kind}): {fault}. "
            'For the rest of this process backend "auto" uses plain operations there, which are slower. Please report '
            "this with the output of `kvshift doctor`. KVSHIFT_SELF_TEST=0 switches the test off.",
            RuntimeWarning,
            stacklevel=2,
        )
    return fault is None


def _in_a_thread(kind: Kind) -> str | None:
    """Return `self_test_fault`, run in a thread without the caller's modes and settings."""
    faults: list[str | None] = ["the test did not end"]

    def run() -> None:
        faults[0] = self_test_fault(kind)

    compiling, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
    waits = torch.cuda.get_sync_debug_mode() if kind.device.type == "cuda" else 0
    if waits:  # the user may have enabled warnings or errors
        torch.cuda.set_sync_debug_mode(0)
    try:
        thread = threading.Thread(target=run, name="kvshift self-test")
        thread.start()
        thread.join()
    finally:
        torch.compiler._is_compiling_flag = compiling
        if waits:
            torch.cuda.set_sync_debug_mode(waits)
    return faults[0]


def _device_name(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)} ({device})" if device.type == "cuda" else str(device)
