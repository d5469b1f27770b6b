"""Theorem 3.3: one attention head with KV shift is the induction head of Definition 3.1.

Shapes: B sequences, L tokens, D width, H query heads. Tokens count from 1 in formulas, from 0 in tensors.

The construction, on tokens x_s of width D:

    W_Q = W_K = W_V = W_O = I,  no residual,  ALiBi slope m,  score scale 1 / sigma
    alpha = (0, 1): the key of token s is x_{s-1};    beta = (1, 0): its value is x_s

`kv_shift_head` is that head around `kvshift.kv_shift`, with any scale, slope and mask. `build_layer` is the same head
as a `kvshift.KVShiftAttention`, which has a scale, slopes and a mask of its own:

- its scale is 1 / sqrt(D): sigma goes into alpha = (0, sqrt(D) / sigma) instead;
- its slopes are the published ones, 2^(-8 (h + 1) / H): m is one of these;
- its mask is causal, and the theorem's is not (see `kv_shift_head`). `sliding_window = L - 1` takes token 1 away; that
  the last token attends to itself, nothing can.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvshift import KVShiftAttention, kv_shift
from kvshift.lab.theory.induction_head import alibi_layer, check_head, softmax_between


def kv_shift_head(
    x: Tensor, sigma: float, slope: float, *, first: int = 1, last: int | None = None
) -> tuple[Tensor, Tensor]:
    """The construction's output at the last token, attending to tokens first .. last.

        k_hat, v_hat = kv_shift(x, x, (0, 1), (1, 0))
        w = softmax_s( <x_L, k_hat_s> / sigma - m (L - s) ),    out = sum_s w_s v_hat_s

    With first = 2 and last = L - 1 this *is* the induction head. A plain causal mask, first = 1 and last = L, also
    lets in token 1, whose key is zero, and token L itself; what that does, `mask_gap` says.

    Args:
        x: (B, L, D), L >= 3.
        sigma, slope: as in `induction_head`.
        first, last: of the tokens attended to, from 1; last is L by default.

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
    """How far the causal head is from the induction head, (B, D).

        KVSA - IH = p_1 (x_1 - IH) + p_L (x_L - IH),    p the causal weights

    so that no component is off by more than 2 (p_1 + p_L) max|x|. Reason: beside p_1 x_1 and p_L x_L the causal sum is
    (1 - p_1 - p_L) IH.

    Args:
        x: (B, L, D).
        weights: p, (B, L), over all of 1 .. L.
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
    """The construction as a layer of this package, in float64.

    Args:
        width: D.
        sigma: the temperature, above 0.
        heads: H. All query heads are alike but for their ALiBi slope, and read one KV head.
        head: the one whose output W_O lets through, from 0; `alibi_slopes(heads)[head]` is m.
        sliding_window: of the layer.
        as_printed: set the coefficients of appendix B, alpha = (0, 1) and beta = (1 / sigma, 0), read as they stand.
            A factor on the values leaves the scores as they were and scales the output: this is the induction head
            of sigma = sqrt(D), divided by sigma.

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
