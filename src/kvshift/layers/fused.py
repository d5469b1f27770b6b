"""Shift, QK-norm and rotary embedding in one launch, where the Triton kernels can: the shift rides on the rotation.

Shapes: B batch, T positions, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kvshift.ops import ShiftState
from kvshift.ops.dispatch import is_watched
from kvshift.ops.shift import choose_backend
from kvshift.ops.triton.call import Boundaries, tails_triton, triton_refusal, turn_triton
from kvshift.ops.triton.launch import window_of
from kvshift.ops.triton.step import step_triton

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine, (L, T, 1, D) for `positions.rotate_half` or (L, T, 1, D/2) for `positions.rotate`."""

_DDP_TAKES_CHECKPOINTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch.compile can cut a graph with a checkpoint into DDP's buckets: 2.13 does; see pytorch issue 104674."""

Norms = tuple[nn.Module, nn.Module]
"""Of queries and of keys:  x / sqrt(mean(x^2) + eps) * weight  over D, as in `torch.nn.RMSNorm` and in Llama's."""


@dataclass(frozen=True)
class Room:
    """Where decoding writes: a cache of static shape, and the raw rows beside it.

    Attributes:
        keys, values: (B, G, N, D).
        length: how many tokens each of its rows holds, a tensor of one number on the device.
        state: the raw rows.
    """

    keys: Tensor
    values: Tensor
    length: Tensor
    state: ShiftState


@dataclass(frozen=True)
class Fused:
    """One call of the kernels, made ready by `prepare`."""

    window: int
    alpha: Tensor | None
    beta: Tensor | None
    cos: Tensor
    sin: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None
    eps: float

    def __call__(
        self, q: Tensor | None, k: Tensor, v: Tensor, state: ShiftState | None, boundaries: Boundaries
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q turned, k shifted and turned, v shifted."""
        k_past, v_past = (None, None) if state is None else (state.k, state.v)
        return turn_triton(
            q, k, v, self.alpha, self.beta, self.cos, self.sin, q_scale=self.q_scale, k_scale=self.k_scale,
            eps=self.eps, k_past=k_past, v_past=v_past, boundaries=boundaries,
        )  # fmt: skip

    def made_again(self, k: Tensor, v: Tensor, boundaries: Boundaries) -> tuple[Tensor, Tensor]:
        """k shifted and turned, v shifted, as a compiler is to see them in training.

        It keeps the raw ones for backward, which the gradients of the coefficients need anyway, and makes the others
        again there: what `kvshift.layers.recompute` does where nothing is compiled.
        """
        if not _DDP_TAKES_CHECKPOINTS and DistributedDataParallel._active_ddp_module is not None:
            return self(None, k, v, None, boundaries)[1:]
        return checkpoint(
            lambda k, v: self(None, k, v, None, boundaries)[1:], k, v, use_reentrant=False, preserve_rng_state=False
        )

    def next_state(
        self, k: Tensor, v: Tensor, state: ShiftState | None, sequences: int, boundaries: Boundaries
    ) -> ShiftState:
        """The state of so many sequences after these tokens."""
        k_past, v_past, max_rows = (
            (None, None, self.window - 1) if state is None else (state.k, state.v, state.max_rows)
        )
        k_rows, v_rows = tails_triton(k, v, k_past, v_past, sequences, self.window, max_rows, boundaries)
        return ShiftState(k_rows, v_rows, max_rows)

    def step(self, q: Tensor, k: Tensor, v: Tensor, room: Room) -> Tensor:
        """One token: q turned; k and v go into the cache, and their raw rows into the state, in place."""
        return step_triton(
            q, k, v, self.alpha, self.beta, self.cos, self.sin, room.state.k, room.state.v,
            room.keys.transpose(1, 2), room.values.transpose(1, 2), cache_slots=room.length, own_pages=True,
            q_scale=self.q_scale, k_scale=self.k_scale, eps=self.eps,
        )  # fmt: skip


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    state: ShiftState | None,
    rotary: Rotary,
    norms: Norms | None,
    backend: str,
) -> Fused | None:
    """The call of the kernels, or None where it is not to be made.

    It is made on CUDA devices, under torch.compile in training alone (`takes_kernels`), or if the backend "triton" is
    asked for; never where gradients are to flow through a state or to the tables, nor with norms that compute anything
    else or whose calls somebody watches.
    """
    if not takes_kernels(backend, k.is_cuda, shifts=alpha is not None or beta is not None) or is_watched():
        return None
    if torch.is_grad_enabled() and (state is not None or any(table.requires_grad for table in rotary)):
        return None
    size, width = k.shape[3], rotary[0].shape[-1]
    if (
        size % 2
        or width not in (size, size // 2)
        or any(table.shape not in ((1, k.shape[1], 1, width), (k.shape[0], k.shape[1], 1, width)) for table in rotary)
        or not q.shape[:2] == k.shape[:2] == v.shape[:2]
        or q.shape[3] != size
        or v.shape[2] != k.shape[2]
        or not q.dtype == k.dtype == v.dtype
    ):
        return None
    q_scale = k_scale = None
    eps = 0.0
    if norms is not None:
        if not all(map(_is_plain, norms)):
            return None
        scales, epsilons = zip(*((norm.weight, _epsilon(norm)) for norm in norms), strict=True)
        if epsilons[0] != epsilons[1] or any(scale.shape != (size,) for scale in scales):
            return None
        (q_scale, k_scale), eps = scales, epsilons[0]
    window = window_of(alpha, beta)
    past = () if state is None else (state.k, state.v)
    if triton_refusal(k, window, q, v, alpha, beta, *past, *rotary, q_scale, k_scale) is not None:
        return None
    cos, sin = rotary[0].squeeze(2), rotary[1].squeeze(2)
    if width == size:  # its first half of sin is negated, the second is not
        cos, sin = cos[..., : size // 2], sin[..., size // 2 :]
    return Fused(window, alpha, beta, cos, sin, q_scale, k_scale, eps)


def takes_kernels(backend: str, on_gpu: bool, *, shifts: bool) -> bool:
    """Whether a call is one for the kernels.

    Under torch.compile "auto" takes them for training with a shift: what the compiler makes of plain operations moves
    more bytes there and keeps more (docs/findings.md). It leaves to the compiler what it turns without shift;
    generation, which waits for the processor, to which calling an operator written in Python takes longer; and programs
    that torch.export makes, which are to run where there is no such operator.
    """
    backend = choose_backend(backend)
    if backend != "auto" or not on_gpu:
        return backend == "triton"
    return not torch.compiler.is_compiling() or (shifts and compiles_training())


def compiles_training() -> bool:
    """Whether a compiler looks on that makes forward and backward; one that exports makes neither."""
    return torch.compiler.is_compiling() and torch.is_grad_enabled() and not torch.compiler.is_exporting()


def _is_plain(norm: nn.Module) -> bool:
    """Whether its call is the formula of `Norms` with a gain, and nothing else."""
    hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    return (
        (isinstance(norm, nn.RMSNorm) or hasattr(norm, "variance_epsilon"))  # Llama's has the latter
        and isinstance(norm.weight, Tensor)
        and not any(hooks)
        and "forward" not in norm.__dict__
    )


def _epsilon(norm: Any) -> float:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return torch.finfo(norm.weight.dtype).eps if eps is None else eps
