"""Theorem 3.2: two vanilla layers approximate the induction head of Definition 3.1, at twice the width.

Shapes: B sequences, L tokens, d width of a token, D = 2d width of the model. Tokens count from 1 in formulas, from 0
in tensors.

The construction, on [x_s; 0]:

    layer 1, with residual:  W_Q = W_K = 0, ALiBi slope p, attending to tau <= s - 1 only;  W_V = [[0, 0], [I, 0]]
        gives [x_s; y_s],  y_s = sum_{tau=1}^{s-1} softmax_tau( -p (s - 1 - tau) ) x_tau,  nearly x_{s-1}
    layer 2, no residual:    W_Q = [[0, 0], [I, 0]],  W_K = [[0, 0], [0, I / sigma]],  W_V = [[I, 0], [0, 0]],
        ALiBi slope m, scores without 1 / sqrt(D):  <x_L, y_s> / sigma - m (L - s)

`two_layer_head` computes this construction for any slopes. `build_layers` builds it from two `kvshift.KVShiftAttention`
without shift, for the slopes of ALiBi, 2^(-8 (h + 1) / H), all below 1.

The theorem requires two masks that a decoder does not have. Layer 2 has the caveat of Theorem 3.3: it sums over
s = 2 .. L - 1. In layer 1, a token must not attend to itself: under a plain causal mask (`strict=False`), the token
itself, at distance 0, has most of the weight, so y_s is close to x_s and the construction fails, the more the larger p.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvshift import KVShiftAttention, ShiftOptions
from kvshift_lab.theory.induction_head import alibi_layer, check_head, softmax_between


def previous_tokens(x: Tensor, first_slope: float, *, strict: bool = True) -> Tensor:
    """Return the weighted mean of earlier tokens that layer 1 writes beside each token.

        y_s = sum_{tau=1}^{s-1} softmax_tau( -p (s - 1 - tau) ) x_tau,    y_1 = 0

    Args:
        x: (B, L, d).
        first_slope: p, above 0.
        strict: whether to end the sum at tau = s - 1; False ends it at tau = s, as a decoder's causal mask does.

    Returns:
        (B, L, d).
    """
    place = torch.arange(x.shape[1], device=x.device)
    distance = place.unsqueeze(1) - place.unsqueeze(0)
    seen = distance >= (1 if strict else 0)
    weights = torch.where(seen, -first_slope * distance.to(x.dtype), -torch.inf).softmax(dim=1)
    return torch.where(seen, weights, 0) @ x  # token 1 attends to nothing: its softmax is a row of NaN


def two_layer_head(
    x: Tensor,
    sigma: float,
    first_slope: float,
    slope: float,
    *,
    first: int = 2,
    last: int | None = None,
    strict: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the output of the construction at the last token, and the attention weights of layer 2.

        w = softmax_s( <x_L, y_s> / sigma - m (L - s) ),    TF(X) = sum_{s=first}^{last} w_s x_s

    Args:
        x: (B, L, d), L >= 3.
        sigma, slope: as in `induction_head`.
        first_slope: p, the slope of layer 1, above 0.
        first, last: first and last token that layer 2 attends to, counted from 1; 2 and L - 1 by default.
        strict: as in `previous_tokens`.

    Returns:
        TF(X) (B, d) and the weights of layer 2 (B, L), zero outside first .. last.

    Source:
        Theorem 3.2, appendix A; after Wang et al. (2024).
    """
    check_head(x, sigma, slope)
    if not first_slope > 0:
        raise ValueError(f"first_slope must be above 0, got {first_slope}")
    length = x.shape[1]
    distance = torch.arange(length - 1, -1, -1, dtype=x.dtype, device=x.device)
    y = previous_tokens(x, first_slope, strict=strict)
    scores = torch.einsum("bd,bsd->bs", x[:, -1], y) / sigma - slope * distance
    weights = softmax_between(scores, first, length - 1 if last is None else last)
    return torch.einsum("bs,bsd->bd", weights, x), weights


def copy_bound(first_slope: float, length: int | None = None) -> float:
    """Return a bound on the components of |y_s - x_{s-1}| if those of |x| are at most 1: 2 (1 - 1 / Z_s).

        Z_s = sum_{j=0}^{s-2} e^{-p j},    sup_s (1 - 1 / Z_s) = e^{-p}

    Args:
        first_slope: p.
        length: s; None for the supremum over all lengths.
    """
    if length is None:
        return 2 * math.exp(-first_slope)
    return 2 * (1 - 1 / sum(math.exp(-first_slope * j) for j in range(length - 1)))


def error_bound(width: int, sigma: float, first_slope: float, *, form: str = "derived", radius: float = 1.0) -> float:
    """Return a bound on the components of |TF(X) - IH(X)|.

        "derived"    4 (d / sigma) e^{-p}
        "printed"    4 (d / sigma) e^{-p} / (1 - e^{-p}), the bound in the paper, which is larger
        "sharp"      2 (d / sigma) e^{-p}

    All three multiply |softmax(u) - softmax(v)|_1 by max|x| and bound |u - v| by |x_L|_1 max_s |y_s - x_{s-1}| / sigma.
    The first two use |softmax(u) - softmax(v)|_1 <= 2 max|u - v|; the factor 2 is not needed, because the Jacobian
    diag(w) - w w^T carries signs v to sum_i w_i |v_i - <w, v>| <= 1.

    Args:
        width: d.
        sigma, first_slope: as in `two_layer_head`.
        form: which of the three bounds.
        radius: r, if each component of |x_s| is at most r: the bound is r^3 times that for r = 1. The paper states no
            such condition, but without one, no bound holds.

    Source:
        Theorem 3.2, appendix A, where |I / sigma|_{1,1} = d / sigma.
    """
    forms = {"derived": 4.0, "printed": 4.0 / (1 - math.exp(-first_slope)), "sharp": 2.0}
    if form not in forms:
        raise ValueError(f'form must be "derived", "printed" or "sharp", got {form!r}')
    return forms[form] * radius**3 * width / sigma * math.exp(-first_slope)


def build_layers(
    width: int, sigma: float, *, heads: int = 1, first_head: int = 0, head: int = 0
) -> tuple[KVShiftAttention, KVShiftAttention]:
    """Build both layers of the construction as `KVShiftAttention` without shift, in float64.

    Args:
        width: d; the layers are 2d wide.
        sigma: the temperature, above 0.
        heads: H of each layer. All heads are identical except for their ALiBi slope.
        first_head, head: index, from 0, of the head whose output W_O passes on in layer 1 and in layer 2;
            `alibi_slopes(heads)` gives their slopes p and m.
    """
    if not sigma > 0:
        raise ValueError(f"sigma must be above 0, got {sigma}")
    if not 0 <= first_head < heads:
        raise ValueError(f"first_head must be from 0 to {heads - 1}, got {first_head}")
    eye, none = torch.eye(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)

    def block(upper_left: Tensor, lower_left: Tensor, lower_right: Tensor) -> Tensor:
        return torch.cat([torch.cat([upper_left, none], dim=1), torch.cat([lower_left, lower_right], dim=1)])

    to_lower, upper, zero = block(none, eye, none), block(eye, none, none), block(none, none, none)
    scale = math.sqrt(2 * width) / sigma  # cancels the layer's factor 1 / sqrt(2d), which the theorem does not have
    plain = ShiftOptions(targets=())
    first = alibi_layer(zero, zero, to_lower, heads=heads, head=first_head, shift_options=plain)
    key = block(none, none, scale * eye)
    return first, alibi_layer(to_lower, key, upper, heads=heads, head=head, shift_options=plain)


def run_layers(layers: tuple[KVShiftAttention, KVShiftAttention], x: Tensor) -> Tensor:
    """Return the output of `build_layers` at the last token, (B, d); layer 2 attends to all tokens 1 .. L.

    The layer's mask lets each token attend to itself. Since the queries of layer 1 are zero, its output at token s - 1
    is what token s would get without attending to itself, so the output is moved on by one token.
    """
    first, second = layers
    width = x.shape[2]
    hidden = torch.cat([x, torch.zeros_like(x)], dim=2)
    written, _ = first(hidden)
    hidden = hidden + torch.cat([torch.zeros_like(written[:, :1]), written[:, :-1]], dim=1)
    out, _ = second(hidden)
    return out[:, -1, :width]
