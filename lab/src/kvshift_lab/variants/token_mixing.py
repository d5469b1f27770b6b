"""The base class of variants that replace the shift of an attention by another mixing of tokens.

Shapes: B batch, T positions of this call, G KV heads, D head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kvshift import ShiftState
from kvshift.models.extending import Norms, Rotary, norm_and_rotate


def require_token_mask(attention_mask: Any, variant: str) -> None:
    """Raise a ValueError unless the mask is None or (batch, positions); the variant makes the pairwise mask itself."""
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2):
        what = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention_mask must be (batch, positions) or None for {variant}, got {what}")


class TokenMixing(nn.Module):
    """A module that replaces the `KVShift` of an attention and is called like it. Subclasses implement `mix`.

    Like the shift, it takes raw keys and values, after the projections and before QK-norm and rotary embedding. The
    cache stores its raw rows beside the finished keys and values, and moves, crops and resets them together
    (`kvshift.models.cache`).

    Attributes:
        targets: which of "k" and "v" it changes.
        after_norm: whether it is applied between QK-norm and rotary embedding instead of before both.
    """

    targets: tuple[str, ...] = ("k", "v")
    after_norm: bool = False

    def mix(
        self, k: Tensor, v: Tensor, state: ShiftState | None, *, mask: Tensor | None, seq_idx: Tensor | None
    ) -> tuple[Tensor, Tensor, ShiftState | None]:
        """Return mixed keys and values (B, T, G, D) and the new state; arguments are those of `kvshift.kv_shift`."""
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: ShiftState | None = None,
        mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        rotary: Rotary | None = None,
        norms: Norms | None = None,
        keep_state: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, ShiftState | None]:
        """Apply `mix`, QK-norm and rotary embedding; see `KVShift.forward`."""
        if self.after_norm and norms is not None:
            q, k, norms = norms[0](q), norms[1](k), None
        k, v, state = self.mix(k, v, state, mask=mask, seq_idx=seq_idx)
        q, k = norm_and_rotate(q, k, rotary=rotary, norms=norms)
        return q, k, v, state if keep_state else None
