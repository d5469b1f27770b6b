"""Causal convolutions of keys and values: KV shift with separate coefficients for each channel of a head.

    y[t, c] = weight[c, 0] * x[t, c] + weight[c, 1] * x[t-1, c] + ... + weight[c, W-1] * x[t-W+1, c],    + x[t, c]

where the last term, the residual, is optional. Weights are float32, even in a model of a smaller dtype. The sum is
computed in float32 (float64 for float64) and rounded once. Documents, padding and state are handled as in
`kvshift.kv_shift`: no tap crosses a boundary or reads padding.

Shapes: B batch, T positions, G KV heads, D head size, C = G * D channels, W window.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvshift import KVShift, ShiftOptions, ShiftState
from kvshift.models.extending import lagged_tokens
from kvshift_lab.variants.mixing import Heads, MixingVariant
from kvshift_lab.variants.token_mixing import TokenMixing


def convolve(
    x: Tensor, weight: Tensor, rows: Tensor, *, max_rows: int, residual: bool = False, **boundaries: Any
) -> tuple[Tensor, Tensor]:
    """Return y by the formula above, (B, T, G, D), and the raw rows before the next token.

    Args:
        x: (B, T, G, D).
        weight: (C, W), column j for lag j.
        rows, max_rows, boundaries: as in `kvshift.models.extending.lagged_tokens`.
        residual: whether to add x itself.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    lagged, rows = lagged_tokens(x, rows, weight.shape[1], max_rows=max_rows, dtype=dtype, **boundaries)
    y = x.to(dtype) if residual else torch.zeros_like(x, dtype=dtype)
    for before, of_lag in zip(lagged, weight.to(dtype).view(*x.shape[2:], -1).unbind(-1), strict=True):
        y = torch.addcmul(y, before, of_lag)
    return y.to(x.dtype), rows


class ChannelConvolution(TokenMixing, KVShift):
    """Convolves keys and values, with separate weights for each channel of each KV head.

    Args:
        heads: sizes of the attention.
        window: W.
        residual: whether to add the token itself.
        start: initialisation. "uniform": as in KV shift, U(0, 1), with a last weight that makes the sum 1. "fan_in": as
            in `torch.nn.Conv1d`, U(-1, 1) / sqrt(W). "normal": N(0, initializer_range^2).
        after_norm: see `TokenMixing`.

    Attributes:
        alpha, beta: (C, W), the weights of keys and of values.
        per_head: False, so that `shift_layers` omits it: runs do not record its many weights as shift coefficients.
    """

    per_head = False

    def __init__(
        self, heads: Heads, *, window: int, residual: bool = False, start: str = "uniform", after_norm: bool = False
    ) -> None:
        self.residual, self.start, self.spread, self.after_norm = residual, start, heads.initializer_range, after_norm
        super().__init__(heads.kv_heads * heads.size, ShiftOptions(window=window))

    def start_values(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """See `KVShift.start_values`."""
        if self.start == "uniform":
            return super().start_values(generator)
        draw = torch.rand if self.start == "fan_in" else torch.randn
        drawn = {
            name: draw(weight.shape, generator=generator, device=weight.device)
            for name, weight in self.named_parameters(recurse=False)
        }
        if self.start == "normal":
            return {name: values * self.spread for name, values in drawn.items()}
        return {name: (2 * values - 1) / self.options.window**0.5 for name, values in drawn.items()}

    def mix(
        self, k: Tensor, v: Tensor, state: ShiftState | None, *, mask: Tensor | None, seq_idx: Tensor | None
    ) -> tuple[Tensor, Tensor, ShiftState]:
        """See `TokenMixing.mix`."""
        if state is None:
            state = ShiftState.zeros(
                k.shape[0], k.shape[2], k.shape[3], rows=self.options.window - 1, dtype=k.dtype, device=k.device
            )
        (k_hat, k_rows), (v_hat, v_rows) = (
            convolve(x, weight, rows, max_rows=state.max_rows, residual=self.residual, mask=mask, seq_idx=seq_idx)
            for x, weight, rows in ((k, self.alpha, state.k), (v, self.beta, state.v))
        )
        return k_hat, v_hat, ShiftState(k_rows, v_rows, state.max_rows)


def _variant(name: str, window: int, **options: Any) -> MixingVariant:
    make = partial(ChannelConvolution, window=window, **options)
    return MixingVariant(name=name, make=make, fields={"shift_targets": ["k", "v"], "shift_window": window})


MODEL_VARIANTS = (
    # The same as KV shift, in the same place and with the same initialisation (U(0, 1), summing to 1), but with four
    # coefficients for each channel of a head instead of each head. A comparison of the two shows the effect of this.
    _variant("conv-2", 2),
    # A Canon layer, initialised from U(-1/2, 1/2). It is applied after QK-norm, if any, and before rotary embedding,
    # like Canon-B in its source, which also mixes queries. It has 8 weights for each channel of a head.
    # Source: Allen-Zhu, Physics of Language Models: Part 4.1 (2025); PhysicsLM4,
    # lingua_modified/lingua/canon_helper.py.
    _variant("canon", 4, residual=True, start="fan_in", after_norm=True),
    # The convolution of the released Inkling, initialised from N(0, initializer_range^2). It is applied right after the
    # projections, before the norm of the keys. Inkling also convolves the outputs of attention and MLP, which this
    # variant does not. The initialisation is that of transformers; the one used in Inkling's training is not known.
    # Source: transformers, models/inkling, InklingShortConvolution and InklingAttention.
    _variant("inkling", 4, residual=True, start="normal"),
)
