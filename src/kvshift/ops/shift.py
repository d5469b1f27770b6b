"""The public functions of the operator: they check arguments and call the implementation that `dispatch.py` chooses.

Shapes: B batch, T positions in a row, P positions in a pack, S sequences, G KV heads, D head size, W window,
R rows of state.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from kvshift.ops.arguments import Call
from kvshift.ops.boundaries import plan_shift
from kvshift.ops.cpu.kernel import shift_cpu
from kvshift.ops.dispatch import launch_key, shift_path
from kvshift.ops.reference import shift_reference
from kvshift.ops.state import ShiftState
from kvshift.ops.torch_ops import is_exporting, needs_traceable_ops, shift_eager, shift_traceable, state_after
from kvshift.ops.triton.call import shift_triton, was_launched
from kvshift.ops.triton.compiled_launch import LaunchKey

_AXES = "(batch, positions, heads, head size)"
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # the only ones that PyTorch computes with


def kv_shift(
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    *,
    state: ShiftState | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, ShiftState]:
    """Mix each key and value with those of the preceding tokens, using a few learned coefficients per KV head.

        k_hat[t] = alpha[:, 0] * k[t] + alpha[:, 1] * k[t-1] + ... + alpha[:, W-1] * k[t-W+1]
        v_hat[t] = beta[:, 0] * v[t] + beta[:, 1] * v[t-1] + ... + beta[:, W-1] * v[t-W+1]

    Tokens before the first of a sequence are taken from `state`, or are zero without one. Nothing crosses a document
    boundary. Padding is skipped: the previous token is the previous real one, and the result on padding is zero,
    whatever its content. Feeding a sequence in pieces, each with the state that the previous call returned, gives the
    same result as feeding it whole; decoding feeds pieces of one token.

    Arithmetic is in fp32 (fp64 for fp64 inputs), rounded once to the dtype of k and v. A lag whose coefficient is zero
    is not read: with alpha = beta = (1, 0), the results equal k and v bit for bit. Gradients flow to k, v, alpha, beta
    and the tensors of `state`, with the same bits on every run. For second derivatives (`create_graph=True`), and under
    `torch.func` (`vmap`, `grad`, `jacrev`), tracers and forward-mode AD, every backend falls back to plain operations.

    Args:
        k: raw keys, after projection and before QK-norm and rotary embedding, (B, T, G, Dk), with any strides.
        v: raw values, (B, T, G, Dv).
        alpha: coefficients of the keys, (G, W), column j for lag j; W = 2 in the paper. Best kept in fp32.
            If None, the keys are returned unchanged.
        beta: coefficients of the values, (G, W). If None, the values are returned unchanged.
        state: state returned by an earlier call: the last raw keys and values of the B batch entries, or of the S
            sequences of `cu_seqlens`. None if the sequences begin here.
        cu_seqlens: boundaries of the sequences packed into the single row of k (B = 1), (S + 1,) int32 or int64, from
            0 to P, never decreasing. The state of an empty sequence is returned unchanged.
        seq_idx: number of the document at each position, (B, T) integers; a document begins where it changes. The
            first document of a row continues `state`, and the new state belongs to the last. Cannot be combined with
            `cu_seqlens`.
        mask: False on padding, (B, T) bool. Padding may be on the left, on the right or in between.
        backend: "cpu" (compiled kernel), "triton" (GPU kernels), "eager" (PyTorch operations), "reference" (Python
            loops, for comparison) or "auto": "triton" on CUDA devices and "cpu" elsewhere, if these can take the
            tensors, else "eager".

    Returns:
        k_hat, of the shape of k, v_hat, of the shape of v, and the new state, which shares no memory with k and v.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, device or shape; the message names it.

    Source:
        Xu, Wang, Chen: KV Shifting Attention Enhances Language Modeling, ICML 2025, equation 5; wider windows:
        footnote 10.
    """
    if alpha is None and beta is None:
        raise ValueError("alpha and beta are both None: there is nothing to shift")
    k_state, v_state, _, max_rows = unpack_state(state)
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "mask": mask, "backend": backend}
    call = Call(None, k, v, alpha, beta, k_state, v_state, max_rows=max_rows, **options)
    k_hat, v_hat, next_state = shift_keys_values(call)
    return k_hat, v_hat, cast(ShiftState, next_state)


def shift_keys_values(call: Call) -> tuple[Tensor, Tensor, ShiftState | None]:
    """Return what `kv_shift` returns, but None for the state if no row is kept. Something must be shifted."""
    key = launch_key(call)
    known = was_launched(key)
    if not known:
        check_call(call)
    if call.q is not None:
        call = call._replace(q=None)
    k_hat, v_hat, next_k, next_v = cast(tuple[Any, ...], shift_triton(call, key)[1:] if known else _shift(call, key))
    return k_hat, v_hat, ShiftState(next_k, next_v, call.rows_to_keep()) if call.rows_to_keep() else None


def shift_tokens(
    x: Tensor,
    coefficients: Tensor,
    *,
    state: Tensor | None = None,
    max_rows: int | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Shift a single tensor, for example the queries of QKV-shift, as `kv_shift` shifts k and v.

        x_hat[t] = coefficients[:, 0] * x[t] + coefficients[:, 1] * x[t-1] + ... + coefficients[:, W-1] * x[t-W+1]

    Args:
        x: (B, T, G, D).
        coefficients: (G, W).
        state: raw rows before each sequence, newest last, (S, R, G, D) with R >= W - 1. None stands for zeros.
        max_rows: maximum number of rows of state to return, at least R; R by default.
        cu_seqlens, seq_idx, mask, backend: as in `kv_shift`.

    Returns:
        x_hat, of the shape of x, and the next state.
    """
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "mask": mask, "backend": backend}
    call = Call(None, x, None, coefficients, k_state=state, **options)
    check_input("x", x)
    check_coefficients("coefficients", coefficients, x)
    sequences = check_boundaries(x, cu_seqlens, seq_idx, mask)
    if state is not None:
        _check_rows("state", state, x, sequences, call.window())
    rows = call.rows()
    if max_rows is not None and max_rows < rows:
        raise ValueError(f"max_rows must be at least the number of rows of state, {rows}; got {max_rows}")
    x_hat, _, next_state, _ = _shift(call._replace(max_rows=max_rows or rows))
    return x_hat, cast(Tensor, next_state)


def _shift(call: Call, key: LaunchKey | None = None) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return k, v and their next states (None if none is kept) of a call that has been checked.

    Tensors without coefficients are returned unchanged.
    """
    path, max_rows = shift_path(call), call.rows_to_keep()
    if path != "reference":
        call = with_plan(call)
    if path == "triton":
        return shift_triton(call, key)[1:]
    plan = call.plan()

    def one(x: Tensor | None, coefficients: Tensor | None, state: Tensor | None) -> tuple[Any, Any]:
        if x is None:
            return None, None
        state = call.state_or_zeros(x, state)
        if path == "reference":
            grows = max_rows > 0 and all(bound is None for bound in call.boundaries().values())
            keep = min(max_rows, state.shape[1] + x.shape[1]) if grows else state.shape[1]
            return shift_reference(x, coefficients, state, keep, **call.boundaries())
        shift = {"cpu": shift_cpu, "eager": shift_eager, "traceable": shift_traceable}[path]
        y = x if coefficients is None else shift(x, coefficients, state, plan)
        return y, state_after(x, state, plan, max_rows) if max_rows else None

    (k, next_k), (v, next_v) = one(call.k, call.alpha, call.k_state), one(call.v, call.beta, call.v_state)
    return k, v, next_k, next_v


def with_plan(call: Call) -> Call:
    """Return the call with its plan; unchanged if it has one, has no boundaries or shifts nothing."""
    bounds, window = call.boundaries(), call.window()
    if window == 1 or all(bound is None for bound in bounds.values()) or call.sources is not None:
        return call
    (batch, positions), backward = call.k.shape[:2], torch.is_grad_enabled()
    plan = plan_shift(batch, positions, window, call.rows(), call.k.device, **bounds, backward=backward)
    return call._replace(**plan._asdict())


def _describe(**tensors: Tensor) -> str:
    """Describe tensors for error messages: `k is (2, 3, 5, 7) torch.float32 on cpu, ...`."""
    return ", ".join(f"{name} is {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in tensors.items())


def check_tensor(name: str, x: Tensor, axes: str) -> None:
    """Raise a TypeError unless x is a dense (strided, not nested) tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {axes}, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        kind = "a nested one" if x.is_nested else f"one of layout {x.layout}"
        raise TypeError(f"{name} must be a dense tensor {axes}, got {kind}")


def check_call(call: Call) -> None:
    """Raise the errors of `kv_shift` for invalid tensors or, if one is shifted, tensors that do not fit together."""
    k, v, alpha, beta = cast(tuple[Any, ...], call[1:5])
    if call.q is not None:
        check_tensor("q", call.q, _AXES)
    check_input("k", k)
    check_input("v", v)
    shifts = any(coefficients is not None for coefficients in (alpha, beta, call.gamma))
    if shifts and (v.shape[:3] != k.shape[:3] or v.dtype != k.dtype or v.device != k.device):
        raise ValueError(f"v must match k in batch, positions, heads, dtype and device; {_describe(k=k, v=v)}")
    if alpha is not None:
        check_coefficients("alpha", alpha, k)
    if beta is not None:
        check_coefficients("beta", beta, v)
        if alpha is not None and alpha.shape != beta.shape:
            raise ValueError(f"alpha and beta must have the same shape; {_describe(alpha=alpha, beta=beta)}")
    sequences = check_boundaries(k, **call.boundaries())
    if shifts:
        _check_state(call, sequences)


def check_input(name: str, x: Tensor) -> None:
    """Raise the errors of `kv_shift` unless x is a 4-dimensional floating-point tensor."""
    check_tensor(name, x, _AXES)
    if x.ndim != 4:
        raise ValueError(f"{name} must have 4 dimensions {_AXES}; {_describe(**{name: x})}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be of a floating-point dtype; {_describe(**{name: x})}")


def check_coefficients(name: str, coefficients: Tensor, x: Tensor) -> None:
    """Raise the errors of `kv_shift` unless the coefficients fit x."""
    check_tensor(name, coefficients, "(heads, window)")
    if coefficients.ndim != 2 or coefficients.shape[0] != x.shape[2] or coefficients.shape[1] < 2:
        raise ValueError(
            f"{name} must be (heads, window) with {x.shape[2]} heads and window >= 2; "
            f"{_describe(**{name: coefficients})}"
        )
    if not coefficients.is_floating_point() or coefficients.device != x.device:
        raise ValueError(f"{name} must be of a floating-point dtype on {x.device}; {_describe(**{name: coefficients})}")


def check_boundaries(x: Tensor, cu_seqlens: Tensor | None, seq_idx: Tensor | None, mask: Tensor | None) -> int:
    """Check document boundaries and padding, and return S, the number of sequences that have a state."""
    batch, positions = x.shape[:2]
    for name, tensor in (("cu_seqlens", cu_seqlens), ("seq_idx", seq_idx), ("mask", mask)):
        if tensor is not None:
            check_tensor(name, tensor, "or None")
    for name, tensor in (("seq_idx", seq_idx), ("mask", mask)):
        if tensor is not None and (tensor.shape != x.shape[:2] or tensor.device != x.device):
            raise ValueError(f"{name} must be ({batch}, {positions}) on {x.device}; {_describe(**{name: tensor})}")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be of dtype torch.bool, False on padding; {_describe(mask=mask)}")
    if seq_idx is not None and seq_idx.dtype not in _INTEGERS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _INTEGERS)
        raise TypeError(f"seq_idx must be of an integer dtype, {names}; {_describe(seq_idx=seq_idx)}")
    if cu_seqlens is None:
        return batch
    if seq_idx is not None:
        raise ValueError("cu_seqlens and seq_idx both name the documents: give one of them")
    if batch != 1:
        raise ValueError(f"with cu_seqlens the batch must be 1 row that holds all sequences, got {batch} rows")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be of dtype torch.int32 or torch.int64; {_describe(cu_seqlens=cu_seqlens)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.device != x.device:
        raise ValueError(f"cu_seqlens must be (sequences + 1,) on {x.device}; {_describe(cu_seqlens=cu_seqlens)}")
    check_cu_seqlens("cu_seqlens", cu_seqlens, positions)
    return cu_seqlens.shape[0] - 1


def check_cu_seqlens(name: str, cu_seqlens: Tensor, positions: int) -> None:
    """Raise a ValueError unless boundaries rise from 0 to `positions`; a RuntimeError on GPUs and in compiled calls."""
    if needs_traceable_ops() or is_exporting():  # such a program must not depend on data
        return
    valid = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == positions) & (cu_seqlens.diff() >= 0).all()
    number = "" if torch.compiler.is_compiling() else f"{positions}, "  # would be a constant of the compiled program
    message = f"{name} must be non-decreasing from 0 to {number}the number of positions"
    if torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu":
        torch.ops.aten._assert_async.msg(valid, message)  # does not synchronise with the device
    elif not valid:
        raise ValueError(f"{message}; got {cu_seqlens.tolist()}")


def unpack_state(state: ShiftState | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, int | None]:
    """Return `k_state`, `v_state`, `q_state` and `max_rows` of a `Call`; all None without a state."""
    if state is None:
        return None, None, None, None
    if not isinstance(state, ShiftState):
        raise TypeError(f"state must be a ShiftState or None, got {type(state).__name__}")
    return state.k, state.v, state.q, state.max_rows


def _check_state(call: Call, sequences: int) -> None:
    k, v = call.k_state, call.v_state
    if k is None or v is None or call.v is None:
        return
    _check_rows("state.k", k, call.k, sequences, call.window())
    _check_rows("state.v", v, call.v, sequences, call.window())
    # max_rows is irrelevant if no row is kept.
    if k.shape[1] != v.shape[1] or (call.max_rows and k.shape[1] > call.max_rows):
        raise ValueError(
            f"state must hold equally many keys and values, at most max_rows; got {k.shape[1]} rows of keys and "
            f"{v.shape[1]} of values with max_rows = {call.max_rows}"
        )


def _check_rows(name: str, state: Tensor, x: Tensor, sequences: int, window: int) -> None:
    expected = (sequences, *x.shape[2:])
    check_tensor(name, state, "(sequences, rows, heads, head size)")
    if state.ndim != 4 or (state.shape[0], *state.shape[2:]) != expected or state.shape[1] < window - 1:
        raise ValueError(
            f"{name} must be ({sequences}, rows, {x.shape[2]}, {x.shape[3]}) with rows >= {window - 1} "
            f"(window - 1); {_describe(**{name: state})}"
        )
    if state.dtype != x.dtype or state.device != x.device:
        raise ValueError(f"{name} must be {x.dtype} on {x.device}; {_describe(**{name: state})}")
