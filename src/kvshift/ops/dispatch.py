"""The choice of an implementation for each call.

`shift_path` and `fused_path` choose by the arguments, the device, and any active compiler, tracer or transform.

Shapes: B batch, T positions, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from kvshift.ops.arguments import Call, compute_dtype
from kvshift.ops.cpu.kernel import cpu_unsupported_reason
from kvshift.ops.memory import PLAIN_TENSOR_TYPES, forbids_in_place, is_lazy, unreadable_reason
from kvshift.ops.torch_ops import is_exporting, needs_traceable_ops
from kvshift.ops.triton.call import triton_unsupported_reason, was_launched
from kvshift.ops.triton.compiled_launch import Kept, LaunchKey, geometry

BACKENDS = ("auto", "cpu", "triton", "eager", "reference")
_AUTO = os.environ.get("KVSHIFT_BACKEND", "auto")  # the meaning of "auto" in this process
_UNSUPPORTED_REASONS: dict[str, Any] = {"cpu": cpu_unsupported_reason, "triton": triton_unsupported_reason}
_KERNEL_TYPES = {"cpu": PLAIN_TENSOR_TYPES, "triton": (*PLAIN_TENSOR_TYPES, torch._subclasses.FakeTensor)}

# By a transform of `torch.func`, which may have ended and left the tensor behind.
_is_wrapped: Callable[[Tensor], bool] = cast(Any, torch._C)._functorch.is_functorch_wrapped_tensor

ShiftPath = Literal["reference", "traceable", "eager", "cpu", "triton"]
FusedPath = Literal["next token", "reference", "launch", "unfused"]


def choose_backend(backend: str) -> str:
    """Return `backend`, or the value of the environment variable KVSHIFT_BACKEND (if set) in place of "auto".

    Raises:
        ValueError: `backend` or the value of the variable is not a backend.
    """
    if backend == _AUTO == "auto":
        return backend
    for name, value in (("backend", backend), ("the environment variable KVSHIFT_BACKEND", _AUTO)):
        if value not in BACKENDS:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, BACKENDS))}; got {value!r}")
    return _AUTO if backend == "auto" else backend


_KEYS: Kept[LaunchKey] = Kept()


def launch_key(call: Call) -> LaunchKey | None:
    """Return what stands for all that decides how the Triton kernels compute a call, apart from the tensors' addresses.

    Checking a small call takes as long as launching it. Calls with the same key need not be checked again. None if the
    call cannot be launched, or not without looking further: it has boundaries, or tensors that are not plain or lazy.
    """
    k, norms = call.k, call.norms
    if (
        type(k) not in PLAIN_TENSOR_TYPES
        or triton_unsupported_reason(k, 1) is not None
        or not call.cu_seqlens is call.seq_idx is call.mask is call.gamma is None
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or needs_traceable_ops()
    ):
        return None
    tensors: tuple[Any, ...] = call[:9]
    parts: list[Hashable] = [call.backend, _AUTO, call.max_rows, torch.is_grad_enabled()]
    if norms is not None:
        if not (_is_plain(norms[0]) and _is_plain(norms[1])):
            return None
        (q_gain, q_eps), (k_gain, k_eps) = map(gain_and_epsilon, norms)
        tensors += q_gain, k_gain
        parts += q_eps, k_eps
    for x in tensors:
        if x is None:
            parts.append(None)
        elif (
            type(x) not in PLAIN_TENSOR_TYPES
            or x.layout is not torch.strided
            or x.is_nested
            or is_lazy(x)
            or _is_wrapped(x)
        ):
            return None
        else:
            parts += geometry(x), x.requires_grad
    whole = tuple(parts)
    key = _KEYS.get(whole)
    if key is None:
        key = _KEYS[whole] = LaunchKey()
    return key


def shift_path(call: Call) -> ShiftPath:
    """Return the implementation that shifts: "traceable" if needed, whatever the backend (except "reference").

    It is needed where `needs_traceable_ops` is true and, in place of "eager", for tensors that `forbids_in_place`.

    Raises:
        ValueError: the requested backend does not exist or cannot take the tensors.
    """
    backend: Any = choose_backend(call.backend)
    if backend == "reference":
        return backend
    if needs_traceable_ops():
        return "traceable"
    x, others = call.k, (call.v, call.alpha, call.beta, call.k_state, call.v_state, *call.boundaries().values())
    if backend == "auto":
        if torch.compiler.is_compiling():  # it fuses the few operations of eager with their neighbours
            return "eager"
        kernels = "triton" if is_gpu(x) else "cpu"
        backend = kernels if _unsupported_reason(kernels, call.window(), x, *others) is None else "eager"
    elif backend in _UNSUPPORTED_REASONS:
        refusal = _unsupported_reason(backend, call.window(), x, *others)
        if refusal is not None:
            raise ValueError(f'backend "{backend}" cannot be used here: {refusal}')
    if backend == "eager" and not torch.compiler.is_compiling() and any(map(forbids_in_place, (x, *others))):
        return "traceable"
    return backend


def fused_path(call: Call, key: LaunchKey | None = None) -> FusedPath:
    """Choose how to shift, normalise and rotate: in one launch, or in separate steps.

    The next token of generation, if `kvshift.models.next_token` does not compute it in one call, uses a few plain
    operations on every device, because preparing a launch occupies the host for longer. Otherwise, one launch is used
    on CUDA devices, or if the backend "triton" is requested. It is never used if gradients would have to flow through
    a state or to the rotary tables, if the norms compute anything else than RMSNorm, or if they have hooks.

    Args:
        key: the `launch_key` of the call, for which the answer may be known.
    """
    if (
        call.backend == _AUTO == "auto"
        and not torch.is_grad_enabled()
        and _is_next_token(call)
        and not needs_traceable_ops(by_compiler=True)
    ):
        return "next token"
    if call.cos is not None and was_launched(key):
        return "launch"
    k, backend = call.k, choose_backend(call.backend)
    if backend == "reference" and (call.norms is None or all(map(_is_plain, call.norms))):
        return "reference"
    if call.cos is None or call.gamma is not None or not isinstance(k, Tensor):
        return "unfused"
    shifts = call.alpha is not None or call.beta is not None
    if not should_launch(backend, is_gpu(k), shifts=shifts) or needs_traceable_ops() or not _fits_launch(call):
        return "unfused"
    return "launch"


def is_gpu(x: Tensor) -> bool:
    """Return True if "auto" considers the Triton kernels for x."""
    return x.is_cuda


def should_launch(backend: str, on_gpu: bool, *, shifts: bool) -> bool:
    """Return True if a call with rotary embedding should use the kernels.

    Under torch.compile, "auto" uses them for training with a shift, because the code that the compiler generates from
    plain operations moves and saves more bytes (docs/findings.md). It leaves everything else to the compiler: rotation
    without a shift; generation, which waits for the host, where calling an operator written in Python takes longer; and
    programs made by torch.export, which must run where no such operator exists.
    """
    backend = choose_backend(backend)
    if backend != "auto" or not on_gpu:
        return backend == "triton"
    return not torch.compiler.is_compiling() or (shifts and is_compiling_training())


def is_compiling_training() -> bool:
    """Return True while torch.compile traces a forward pass for training; torch.export does not count."""
    return torch.compiler.is_compiling() and torch.is_grad_enabled() and not is_exporting()


def gain_and_epsilon(norm: Any) -> tuple[Tensor | None, float]:
    """Return the weight and eps of a norm, as named in `Norms`; (None, 0.0) without a norm."""
    if norm is None:
        return None, 0.0
    members = norm.__dict__  # failing to find an attribute takes microseconds on a module
    if "eps" in members or "variance_epsilon" in members:
        eps = members.get("variance_epsilon", members.get("eps"))
    else:
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = norm.weight
    return weight, torch.finfo(compute_dtype(weight)).eps if eps is None else eps


def _unsupported_reason(kernels: str, window: int, x: Tensor, *others: Tensor | None) -> str | None:
    """Return why the kernels cannot take x or the other tensors of the call; None if they can."""
    refusal = _UNSUPPORTED_REASONS[kernels](x, window)
    if refusal is None and not is_exporting():  # it uses tensors without data, which are not plain
        for tensor in (x, *others):
            if tensor is not None and refusal is None:
                refusal = unreadable_reason(tensor, x.device, types=_KERNEL_TYPES[kernels])
    return refusal


def _is_next_token(call: Call) -> bool:
    """Return True for one plain token per sequence, either not shifted or with window 2 and one row of state."""
    q, k, v, alpha, beta, k_state, v_state = call[:7]
    if call.gamma is not None or not call.cu_seqlens is call.seq_idx is call.mask is None:
        return False
    tensors: tuple[Any, ...] = call[:7]
    if q is None or k is None or v is None or not all(x is None or type(x) in PLAIN_TENSOR_TYPES for x in tensors):
        return False  # it computes in place
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if not len(of_q) == len(of_k) == len(of_v) == 4:
        return False
    batch, positions, heads, size = of_k
    if positions != 1 or of_q != (batch, 1, of_q[2], size) or of_v != (batch, 1, heads, of_v[3]):
        return False
    if not (q.dtype is v.dtype is k.dtype and q.layout is v.layout is k.layout is torch.strided):
        return False
    if alpha is beta is None:
        return True
    return (
        (call.max_rows == 0 or call.max_rows == 1)
        and (alpha is None or alpha.shape == (heads, 2))
        and (beta is None or beta.shape == (heads, 2))
        and k_state is not None
        and v_state is not None
        and k_state.shape == of_k
        and v_state.shape == of_v
        and k_state.dtype is v_state.dtype is k.dtype
        and k_state.device == k.device
    )


def _fits_launch(call: Call) -> bool:
    """Return True if the kernels can compute this rotated call. Invalid calls go to the other path, which raises."""
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
    return _unsupported_reason("triton", call.window(), k, *others) is None


_PLAIN_FORWARDS: set[Callable] = {nn.RMSNorm.forward}


def register_norm(norm: type[nn.Module]) -> None:
    """Let kernels compute norms of this class, whose `forward` computes the formula of `Norms` with a gain."""
    _PLAIN_FORWARDS.add(norm.forward)


def has_plain_forward(norm: nn.Module) -> bool:
    """Return True if `forward` of the norm is that of a registered class: not a subclass's, nor one set later."""
    return type(norm).forward in _PLAIN_FORWARDS and "forward" not in norm.__dict__


def _is_plain(norm: nn.Module) -> bool:
    """Return True if calling the norm computes the formula of `Norms` with a gain, and nothing else."""
    hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    hooked = any(hooks) or nn.modules.module._has_any_global_hook()
    return has_plain_forward(norm) and isinstance(norm.weight, Tensor) and not hooked
