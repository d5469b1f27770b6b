"""The partial key offset: half of each key comes from the previous token, so that one layer can be an induction head.

    y[t, d] = k[t-1, d] for d in D/4 .. D/2 and 3D/4 .. D,    k[t, d] for the others and where a document begins

It replaces the shift, after the projections and before QK-norm and rotary embedding; the offset dimensions have the
slower half of the rotary frequencies. Nothing is learned. "key-offset-whole" offsets all dimensions. It equals KV shift
with alpha = (0, 1) and beta = (1, 0), except that keys are unchanged where a document begins.

Source: modded-nanogpt (pull request 169). There, these dimensions are not rotated, documents are not kept apart, and
keys are changed in place through a view of themselves, which is not deterministic (issue 335); here, a copy is made.

Shapes: B batch, T positions, D head size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvshift import ShiftState
from kvshift_lab.variants.mixing import Heads, MixingVariant, tokens_before
from kvshift_lab.variants.token_mixing import TokenMixing


class KeyOffset(TokenMixing):
    """The formula above, in place of the shift of an attention; a token whose keys are all exactly 0 counts as padding.

    Args:
        heads: sizes of the attention; the head size D must be a multiple of 4.
        whole: whether to offset all dimensions.
    """

    targets = ("k",)

    def __init__(self, heads: Heads, *, whole: bool = False) -> None:
        super().__init__()
        if heads.size % 4:
            raise ValueError(f"the head size must be a multiple of 4, got {heads.size}")
        self.whole = whole

    def mix(
        self, k: Tensor, v: Tensor, state: ShiftState | None, *, mask: Tensor | None, seq_idx: Tensor | None
    ) -> tuple[Tensor, Tensor, ShiftState]:
        """See `TokenMixing.mix`; the state contains no values."""
        rows, max_rows = (None, 1) if state is None else (_marked(state.k), state.max_rows)
        before, rows = tokens_before(_marked(k), state=rows, max_rows=max_rows, mask=mask, seq_idx=seq_idx)
        index_D = torch.arange(k.shape[-1], device=k.device)
        offset_D = (index_D // (k.shape[-1] // 4) % 2 == 1) | self.whole
        k = torch.where((before[..., -1:] != 0) & offset_D, before[..., :-1], k)
        return k, v, ShiftState(rows[..., :-1], v.new_zeros(*rows.shape[:3], 0), max_rows)


def _marked(k: Tensor) -> Tensor:
    """Append a dimension that is 1 for tokens and 0 for padding; the shift makes it 0 where no token precedes."""
    not_padding_BT11 = (k != 0).flatten(2).any(-1)[..., None, None]
    return torch.cat([k, not_padding_BT11.expand(*k.shape[:3], 1).to(k.dtype)], dim=-1)


_FIELDS = {"shift_targets": ["k"], "shift_window": 2}

MODEL_VARIANTS = (
    MixingVariant(name="key-offset", make=KeyOffset, fields=_FIELDS),
    MixingVariant(name="key-offset-whole", make=partial(KeyOffset, whole=True), fields=_FIELDS),
)
