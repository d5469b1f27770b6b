"""The tensors of a call, as the Triton kernels and the plain operations beside them read them.

Shapes: B batch, T positions, S sequences, R rows of state, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvshift.ops.boundaries import ShiftPlan


class Inputs(NamedTuple):
    """What is shifted, normalised and rotated, in the order in which torch.library is given it; None: it is not there.

    Attributes:
        q: (B, T, H, D), rotated and not shifted; k: (B, T, G, D); v: (B, T, G, Dv).
        alpha, beta: (G, W); None: k or v is not shifted.
        k_state, v_state: (S, R, G, D) and (S, R, G, Dv), the rows before each sequence; None: zeros.
        cos, sin: tables of the rotation, (L, T, D/2), L = 1 or B; None: q and k are not rotated.
        q_scale, k_scale: (D,), of the norm before the rotation; None: without norm.
        sources, next_state, readers: as in a `kvshift.ops.boundaries.ShiftPlan`; None without boundaries.
    """

    q: Tensor | None
    k: Tensor
    v: Tensor | None
    alpha: Tensor | None = None
    beta: Tensor | None = None
    k_state: Tensor | None = None
    v_state: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    sources: Tensor | None = None
    next_state: Tensor | None = None
    readers: Tensor | None = None

    def plan(self) -> ShiftPlan | None:
        """None without boundaries."""
        if self.sources is None or self.next_state is None:
            return None
        return ShiftPlan(self.sources, self.next_state, self.readers)

    def window(self) -> int:
        """W; 1 where nothing is shifted."""
        shifted = self.alpha if self.beta is None else self.beta
        return 1 if shifted is None else shifted.shape[1]
