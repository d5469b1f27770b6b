"""The data-dependent shift of the Forgetting Transformer (FoX), gated by the hidden state of each token.

    y[t] = a[t] * x[t-1] + (1 - a[t]) * x[t],    a[t] = sigmoid(w . h[t]),    x[t-1] = 0 where a document begins

for keys x = k and values x = v. Each KV head has one w for keys and another for values; h is the input of the
projections. The shift is applied before the norm of the keys. It has 2 E parameters per KV head and no bias, and is
initialised from N(0, initializer_range^2).

Source: Lin, Nikishin, He, Courville: Forgetting Transformer (ICLR 2025, arXiv 2503.02130), the KV-shift of its Pro
block; `ShiftLinear` in zhixuan-lin/forgetting-transformer. The rest of that block (forget gate, output gate and norm)
is not implemented here.

Shapes: B batch, T positions, G KV heads, D head size, E model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvshift import ShiftState
from kvshift_lab.variants.mixing import Heads, MixingVariant, tokens_before
from kvshift_lab.variants.token_mixing import TokenMixing


class FoXShift(TokenMixing):
    """The formula above, computed in float32 (float64 for float64) and rounded once.

    Attributes:
        key_gate, value_gate: (G, E), the w of each KV head.
    """

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.key_gate, self.value_gate = (
            nn.Parameter(torch.empty(heads.kv_heads, heads.width).normal_(std=heads.initializer_range)) for _ in "kv"
        )
        self._gates: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def reading(self, hidden_states: Tensor) -> Iterator[None]:
        """While this context is open, use the gates of tokens with these hidden states, (B, T, E)."""
        dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        h_BTE = hidden_states.to(dtype)
        key_gate, value_gate = (torch.sigmoid(h_BTE @ w.to(dtype).T) for w in (self.key_gate, self.value_gate))
        self._gates = key_gate.unsqueeze(-1), value_gate.unsqueeze(-1)
        try:
            yield
        finally:
            self._gates = None

    def mix(
        self, k: Tensor, v: Tensor, state: ShiftState | None, *, mask: Tensor | None, seq_idx: Tensor | None
    ) -> tuple[Tensor, Tensor, ShiftState]:
        """See `TokenMixing.mix`; call it inside `reading`."""
        if self._gates is None:
            raise RuntimeError("mix has no gates: call it within `reading`, which computes them")
        all_rows, max_rows = ((None, None), 1) if state is None else ((state.k, state.v), state.max_rows)
        (k_hat, k_rows), (v_hat, v_rows) = (
            _shifted(x, gate, state=rows, max_rows=max_rows, mask=mask, seq_idx=seq_idx)
            for x, gate, rows in zip((k, v), self._gates, all_rows, strict=True)
        )
        return k_hat, v_hat, ShiftState(k_rows, v_rows, max_rows)


def _shifted(x: Tensor, gate: Tensor, **boundaries: Any) -> tuple[Tensor, Tensor]:
    """Apply the formula to x (B, T, G, D) with gates (B, T, G, 1); return y and the next state, as `shift_tokens`."""
    before, rows = tokens_before(x, **boundaries)
    return torch.lerp(x.to(gate.dtype), before.to(gate.dtype), gate).to(x.dtype), rows


class _HiddenStatesForShift:
    """A mixin for an attention that gives the input of its projections to its shift, too."""

    shift: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        with self.shift.reading(hidden_states):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


MODEL_VARIANTS = (
    MixingVariant(
        name="fox-shift",
        make=FoXShift,
        attention=_HiddenStatesForShift,
        fields={"shift_targets": ["k", "v"], "shift_window": 2},
    ),
)
