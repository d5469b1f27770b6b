"""Which implementation takes a call: the one place that decides.

`shift_path` and `fused_path` answer from the record of a call, the device and who looks on.

Shapes: B batch, T positions, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

import os
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from kvshift.ops.arguments import Call
from kvshift.ops.cpu.kernel import cpu_refusal
from kvshift.ops.torch_ops import PLAIN, is_exporting, needs_traceable_ops
from kvshift.ops.triton.call import triton_refusal
from kvshift.ops.triton.self_test import Kind, passes_self_test

BACKENDS = ("auto", "cpu", "triton", "eager", "reference")
_AUTO = os.environ.get("KVSHIFT_BACKEND", "auto")  # what "auto" stands for in this process
_REFUSALS: dict[str, Any] = {"cpu": cpu_refusal, "triton": triton_refusal}
_PLAIN = {"cpu": PLAIN, "triton": (*PLAIN, torch._subclasses.FakeTensor)}  # what kernels can read by its address

ShiftPath = Literal["reference", "traceable", "eager", "cpu", "triton"]
FusedPath = Literal["next token", "reference", "launch", "unfused"]


def choose_backend(backend: str) -> str:
    """What the caller asks for, or, where that is "auto", what the environment variable KVSHIFT_BACKEND does.

    Raises:
        ValueError: there is no such backend.
    """
    if backend == _AUTO == "auto":
        return backend
    for name, value in (("backend", backend), ("the environment variable KVSHIFT_BACKEND", _AUTO)):
        if value not in BACKENDS:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, BACKENDS))}; got {value!r}")
    return _AUTO if backend == "auto" else backend


def shift_path(call: Call) -> ShiftPath:
    """Which implementation shifts; "traceable" for every backend where `needs_traceable_ops` says so.

    Raises:
        ValueError: the backend that was asked for does not exist or cannot take the tensors.
    """
    backend: Any = choose_backend(call.backend)
    if backend == "reference":
        return backend
    if needs_traceable_ops():
        return "traceable"
    x, others = call.k, (call.v, call.alpha, call.beta, call.k_state, call.v_state, *call.boundaries().values())
    if backend == "auto":
        if torch.compiler.is_compiling():  # which fuses eager's few operations with their neighbours
            return "eager"
        kernels = "triton" if is_gpu(x) else "cpu"
        refused = _refusal(kernels, call.window(), x, *others) is not None
        return "eager" if refused or (kernels == "triton" and not _passes_self_test(call)) else kernels
    if backend in _REFUSALS:
        refusal = _refusal(backend, call.window(), x, *others)
        if refusal is not None:
            raise ValueError(f'backend "{backend}" cannot be used here: {refusal}')
    return backend


def fused_path(call: Call) -> FusedPath:
    """How shift, QK-norm and rotary embedding are done: in one launch, or one after the other.

    The next token of generation takes a few plain operations, on every device: preparing a launch keeps the host
    longer (docs/findings.md). Else one launch is for CUDA devices, or where the backend "triton" is asked for; never
    where gradients are to flow through a state or to the tables, nor with norms that compute anything else or whose
    calls somebody watches.
    """
    if (
        call.backend == _AUTO == "auto"
        and not torch.is_grad_enabled()
        and _is_next_token(call)
        and not needs_traceable_ops(by_compiler=True)
    ):
        return "next token"
    k, backend = call.k, choose_backend(call.backend)
    if backend == "reference" and (call.norms is None or all(map(_is_plain, call.norms))):
        return "reference"
    if call.cos is None or call.gamma is not None or not isinstance(k, Tensor):
        return "unfused"
    shifts = call.alpha is not None or call.beta is not None
    if not takes_launch(backend, is_gpu(k), shifts=shifts) or needs_traceable_ops() or not _fits_launch(call):
        return "unfused"
    return "launch" if backend == "triton" or _passes_self_test(call) else "unfused"


def is_gpu(x: Tensor) -> bool:
    """Whether "auto" takes the Triton kernels for x."""
    return x.is_cuda


def takes_launch(backend: str, on_gpu: bool, *, shifts: bool) -> bool:
    """Whether a call with rotary embedding is one for the kernels.

    Under torch.compile "auto" takes them for training with a shift: what the compiler makes of plain operations moves
    more bytes there and keeps more (docs/findings.md). It leaves to the compiler what it rotates without shift;
    generation, which waits for the host, to which calling an operator written in Python takes longer; and programs
    that torch.export makes, which are to run where there is no such operator.
    """
    backend = choose_backend(backend)
    if backend != "auto" or not on_gpu:
        return backend == "triton"
    return not torch.compiler.is_compiling() or (shifts and compiles_training())


def compiles_training() -> bool:
    """Whether a compiler looks on that makes forward and backward; one that exports makes neither."""
    return torch.compiler.is_compiling() and torch.is_grad_enabled() and not is_exporting()


def gain_and_epsilon(norm: Any) -> tuple[Tensor | None, float]:
    """What `Norms` calls weight and eps; of None, a norm that is not there."""
    if norm is None:
        return None, 0.0
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return norm.weight, torch.finfo(norm.weight.dtype).eps if eps is None else eps


def _passes_self_test(call: Call) -> bool:
    """Whether the Triton kernels compute on this device what they should; asked where "auto" would take them."""
    k, v = call.k, call.k if call.v is None else call.v
    rotated, normed = call.cos is not None, call.norms is not None
    return passes_self_test(Kind(k.device, k.dtype, k.shape[3], v.shape[3], call.window(), rotated, normed))


def _refusal(kernels: str, window: int, x: Tensor, *others: Tensor | None) -> str | None:
    """Why they cannot take x, and the other tensors of the call beside it; None if they can."""
    refusal = _REFUSALS[kernels](x, window)
    if refusal is None and not is_exporting():  # of tensors without data, which are no plain ones
        for tensor in (x, *others):
            if tensor is not None and type(tensor) not in _PLAIN[kernels]:
                return f"it takes plain tensors, got a {type(tensor).__name__}"
    return refusal


def _is_next_token(call: Call) -> bool:
    """Whether it is one token of every sequence, behind the one that the state holds; rotated, and at a window of 2."""
    q, k, v, alpha, beta, k_state, v_state = call[:7]
    if call.cos is None or call.gamma is not None or not call.cu_seqlens is call.seq_idx is call.mask is None:
        return False
    if not (isinstance(k, Tensor) and isinstance(q, Tensor) and isinstance(v, Tensor)):
        return False
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if not (len(of_q) == len(of_k) == len(of_v) == 4 and of_k[1] == 1 and of_q[3] == of_k[3]):
        return False
    if not (of_q[0] == of_k[0] == of_v[0] and of_q[1] == of_v[1] == 1 and of_v[2] == of_k[2]):
        return False
    if not (q.dtype is v.dtype is k.dtype and q.layout is v.layout is k.layout is torch.strided):
        return False
    if alpha is beta is None:
        return True
    return (
        (call.max_rows == 0 or call.max_rows == 1)
        and (alpha is None or alpha.shape == (of_k[2], 2))
        and (beta is None or beta.shape == (of_k[2], 2))
        and k_state is not None
        and v_state is not None
        and k_state.shape == of_k
        and v_state.shape == of_v
        and k_state.dtype is v_state.dtype is k.dtype
        and k_state.device == k.device
    )


def _fits_launch(call: Call) -> bool:
    """Whether the kernels compute this rotated call; what no path computes raises an error there."""
    q, k, v, alpha, beta, k_state, v_state, *tables = cast(tuple[Any, ...], call[:9])
    recorded = [table.requires_grad for table in tables] + [k_state is not None, v_state is not None]
    if k.ndim != 4 or (torch.is_grad_enabled() and any(recorded)):
        return False
    batch, positions, _, size = k.shape
    width = tables[0].shape[-1]
    of_tables = [(sequences, positions, 1, width) for sequences in (1, batch)]
    if size % 2 or width not in (size, size // 2) or any(table.shape not in of_tables for table in tables):
        return False
    if isinstance(q, Tensor) and (q.ndim != 4 or q.dtype != k.dtype or q.shape != (batch, positions, q.shape[2], size)):
        return False
    if call.norms is not None and not all(map(_is_plain, call.norms)):
        return False
    gains, epsilons = zip(*map(gain_and_epsilon, call.norms or (None, None)), strict=True)
    if epsilons[0] != epsilons[1] or any(gain is not None and gain.shape != (size,) for gain in gains):
        return False
    others = (q, v, alpha, beta, k_state, v_state, *tables, *gains)
    return _refusal("triton", call.window(), k, *others) is None


def _is_plain(norm: nn.Module) -> bool:
    """Whether its call is the formula of `Norms` with a gain, and nothing else."""
    hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    return (
        (isinstance(norm, nn.RMSNorm) or hasattr(norm, "variance_epsilon"))  # Llama's has the latter
        and isinstance(norm.weight, Tensor)
        and not any(hooks)
        and "forward" not in norm.__dict__
    )
