"""Theorem 3.3: one attention head with KV shift is the induction head of Definition 3.1.

Shapes: B sequences, L tokens, D width, H query heads. Tokens count from 1 in formulas, from 0 in tensors.

The construction, on tokens x_s of width D:

    W_Q = W_K = W_V = W_O = I,  no residual,  ALiBi slope m,  score scale 1 / sigma
    alpha = (0, 1): the key of token s is x_{s-1};    beta = (1, 0): its value is x_s

`kv_shift_head` computes this head with `kvshift.kv_shift`, for any scale, slope and mask. `build_layer` builds it as a
`kvshift.KVShiftAttention`, whose scale, slopes and mask are fixed:

- The scale is 1 / sqrt(D), so sigma is part of alpha = (0, sqrt(D) / sigma) instead.
- The slopes are the published ones, 2^(-8 (h + 1) / H), and m is one of these.
- The mask is causal, unlike the theorem's (see `kv_shift_head`). `sliding_window = L - 1` excludes token 1, but no
  option keeps the last token from attending to itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvshift import KVShiftAttention, kv_shift
from kvshift_lab.theory.induction_head import alibi_layer, check_head, softmax_between


def kv_shift_head(
    x: Tensor, sigma: float, slope: float, *, first: int = 1, last: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output of the construction at the last token, which attends to tokens first .. last, and the weights.

        k_hat, v_hat = kv_shift(x, x, (0, 1), (1, 0))
        w = softmax_s( <x_L, k_hat_s> / sigma - m (L - s) ),    out = sum_s w_s v_hat_s

    With first = 2 and last = L - 1, this *is* the induction head. A plain causal mask, first = 1 and last = L, also
    includes token 1, whose key is zero, and token L itself; `mask_gap` gives the effect.

    Args:
        x: (B, L, D), L >= 3.
        sigma, slope: as in `induction_head`.
        first, last: first and last token attended to, counted from 1; last is L by default.

    Returns:
        out (B, D) and the weights (B, L), zero outside first .. last.

    Source:
        Theorem 3.3, appendix B.
    """
    check_head(x, sigma, slope)
    length = x.shape[1]
    heads_BL1D = x.unsqueeze(2)
    k_hat, v_hat, _ = kv_shift(heads_BL1D, heads_BL1D, x.new_tensor([[0.0, 1.0]]), x.new_tensor([[1.0, 0.0]]))
    distance_L = torch.arange(length - 1, -1, -1, dtype=x.dtype, device=x.device)
    scores_BL = torch.einsum("bd,bsd->bs", x[:, -1], k_hat.squeeze(2)) / sigma - slope * distance_L
    weights_BL = softmax_between(scores_BL, first, length if last is None else last)
    return torch.einsum("bs,bsd->bd", weights_BL, v_hat.squeeze(2)), weights_BL


def mask_gap(x: Tensor, weights: Tensor, head: Tensor) -> Tensor:
    """Return the difference between the causal head and the induction head, (B, D).

        KVSA - IH = p_1 (x_1 - IH) + p_L (x_L - IH),    p the causal weights

    No component is therefore larger than 2 (p_1 + p_L) max|x|. The formula holds because the causal sum is
    p_1 x_1 + p_L x_L + (1 - p_1 - p_L) IH.

    Args:
        x: (B, L, D).
        weights: p, (B, L), over all tokens 1 .. L.
        head: IH, (B, D).
    """
    return weights[:, :1] * (x[:, 0] - head) + weights[:, -1:] * (x[:, -1] - head)


def build_layer(
    width: int,
    sigma: float,
    *,
    heads: int = 1,
    head: int = 0,
    sliding_window: int | None = None,
    as_printed: bool = False,
) -> KVShiftAttention:
    """Build the construction as a `KVShiftAttention` in float64.

    Args:
        width: D.
        sigma: the temperature, above 0.
        heads: H. All query heads are identical except for their ALiBi slope, and share one KV head.
        head: index, from 0, of the head whose output W_O passes on; `alibi_slopes(heads)[head]` is m.
        sliding_window: the layer's sliding window, in tokens; None for all tokens.
        as_printed: whether to use the coefficients as printed in appendix B, alpha = (0, 1) and beta = (1 / sigma, 0).
            A factor on the values does not change the scores, but scales the output: this is the induction head with
            sigma = sqrt(D), divided by sigma.

    Source:
        Appendix B, where "beta_0 = 1 / sigma" must mean the scale of the scores.
    """
    if not sigma > 0:
        raise ValueError(f"sigma must be above 0, got {sigma}")
    identity = torch.eye(width, dtype=torch.float64)
    layer = alibi_layer(identity, identity, identity, heads=heads, head=head, sliding_window=sliding_window)
    alpha, beta = ([0.0, 1.0], [1 / sigma, 0.0]) if as_printed else ([0.0, math.sqrt(width) / sigma], [1.0, 0.0])
    with torch.no_grad():
        layer.shift.get_parameter("alpha").copy_(identity.new_tensor([alpha]))
        layer.shift.get_parameter("beta").copy_(identity.new_tensor([beta]))
    return layer
