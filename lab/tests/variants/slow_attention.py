"""Parts that the slow references of attention share: one document, one head, one token after the other.

Shapes: T positions, D size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def linear(layer: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ layer[f"self_attn.{name}.weight"].T
    return y + layer[f"self_attn.{name}.bias"] if f"self_attn.{name}.bias" in layer else y


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotated(x_TD: Tensor, base: float) -> Tensor:
    """Rotate elements i and i + D/2 as one complex number, by e^(i t / base^(2i / D))."""
    length, size = x_TD.shape
    angles = [[t / base ** (2 * i / size) for i in range(size // 2)] for t in range(length)]
    angles_Tc = torch.tensor(angles, dtype=x_TD.dtype)
    rotated_Tc = torch.complex(*x_TD.chunk(2, dim=1)) * torch.polar(torch.ones_like(angles_Tc), angles_Tc)
    return torch.cat([rotated_Tc.real, rotated_Tc.imag], dim=1)


def attended(q_TD: Tensor, k_TD: Tensor, v_TD: Tensor) -> Tensor:
    """Return each query's mean of the values up to its position, weighted by softmax(q . k / sqrt(D))."""
    size = q_TD.shape[1]
    return torch.stack([(k_TD[: t + 1] @ q / math.sqrt(size)).softmax(0) @ v_TD[: t + 1] for t, q in enumerate(q_TD)])


def mixed(x_TD: Tensor, now: Tensor | float, before: Tensor | float) -> Tensor:
    """Return now * x[t] + before * x[t-1], where x[-1] is zero."""
    return torch.stack([now * x_TD[t] + (before * x_TD[t - 1] if t else 0) for t in range(x_TD.shape[0])])
