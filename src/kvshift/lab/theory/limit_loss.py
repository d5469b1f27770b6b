"""Theorem 3.4 and Table 3: the loss of learning induction, in closed form; as derived and as printed.

The setting: one head with KV shift, no residual, MLP, norm or positions, all projections the identity, no 1 / sqrt(d)
in the scores; T distinct tokens x_1 .. x_T, then x_{T+1} = x_i once more; loss at the last position alone, its target
x_{i+1}, the vocabulary the T tokens, with tied embeddings that become orthonormal as d grows. With

    S = 2 e^{a1} + e^{a2} + (T - 2),    A1 = e^{a1} / S,    A2 = e^{a2} / S

the last token attends to i and to itself with weight A1 each, to i + 1 with A2, to all others with 1 / S. Hence, for
2 <= i <= T - 2, the logits

    token           derived                    Table 3               plotting script (appendix L)
    i + 1           A2 b1 + b2 / S             the same              the same
    i               2 A1 b1 + A2 b2            the same              2 A1 b1 + A2 + b2
    i - 1 and T     b1 / S + A1 b2             b1 / S + A2 b2        b1 / S + A2 b2
    T - 4 others    (b1 + b2) / S              the same              -

    L = -log( e^{l_{i+1}} / ( e^{l_{i+1}} + e^{l_i} + 2 e^{l_{i-1}} + rest ) )

    rest            (T - 4) e^{(b1 + b2) / S}  O(T), a constant c    e^c
    in S            T - 2                      c                     c

The A2 of Table 3 is a slip: the proof above it has b2 e^{a1}. (Token i - 1 is the value of token i through the shift,
and token i has weight A1. Token T is so for token T + 1.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Form:
    """Which formula: the four places where the derivation, the theorem and the script part."""

    others: float
    """What S adds to 2 e^{a1} + e^{a2}: T - 2 as derived, the constant c that stands for O(T) in the paper."""
    side: Literal["A1", "A2"] = "A1"
    """The weight that multiplies b2 in the logits of tokens i - 1 and T; A1 as derived."""
    repeated: Literal["product", "sum"] = "product"
    """The last term in the logit of token i: A2 b2 as derived, or A2 + b2."""
    rest: Literal["tokens", "constant", "exponential"] = "tokens"
    """What the other tokens add to the denominator: (T - 4) e^{(b1 + b2) / S} as derived, c, or e^c."""

    def __post_init__(self) -> None:
        choices = {
            "side": ("A1", "A2"),
            "repeated": ("product", "sum"),
            "rest": ("tokens", "constant", "exponential"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        least = 2 if self.rest == "tokens" else 0
        if not self.others >= least:
            raise ValueError(f"others must be at least {least} with rest={self.rest!r}, got {self.others}")


class TokenLogits(NamedTuple):
    """Logits at the last position, by the kind of token."""

    target: Tensor
    """Of token i + 1."""
    repeated: Tensor
    """Of token i."""
    side: Tensor
    """Of tokens i - 1 and T, each."""
    other: Tensor
    """Of each of the T - 4 others."""


def exact(tokens: int) -> Form:
    """As derived, for T >= 4 distinct tokens."""
    if tokens < 4:
        raise ValueError(f"tokens must be at least 4, for i - 1, i, i + 1 and T to differ; got {tokens}")
    return Form(others=tokens - 2)


def paper(constant: float) -> Form:
    """As printed in Theorem 3.4, with O(T) = c wherever it stands."""
    return Form(others=constant, side="A2", rest="constant")


def script(constant: float) -> Form:
    """As the script of appendix L computes it, with ot = c."""
    return Form(others=constant, side="A2", repeated="sum", rest="exponential")


def token_logits(coefficients: Tensor, form: Form) -> TokenLogits:
    """The logits of Table 3; see the head of the module.

    Args:
        coefficients: a1, a2, b1, b2 in the last dimension, (..., 4).
        form: which formula.

    Returns:
        Tensors (...).

    Source:
        Table 3.
    """
    if coefficients.shape[-1:] != (4,):
        raise ValueError(f"coefficients must be (..., 4): a1, a2, b1, b2; got {tuple(coefficients.shape)}")
    alpha1, alpha2, beta1, beta2 = coefficients.unbind(-1)
    total = 2 * alpha1.exp() + alpha2.exp() + form.others
    a1, a2 = alpha1.exp() / total, alpha2.exp() / total
    last = a2 * beta2 if form.repeated == "product" else a2 + beta2
    return TokenLogits(
        target=a2 * beta1 + beta2 / total,
        repeated=2 * a1 * beta1 + last,
        side=beta1 / total + (a1 if form.side == "A1" else a2) * beta2,
        other=(beta1 + beta2) / total,
    )


def loss(coefficients: Tensor, form: Form) -> Tensor:
    """L in nats; see the head of the module.

    Args:
        coefficients: a1, a2, b1, b2 in the last dimension, (..., 4).
        form: which formula.

    Returns:
        (...); differentiable.

    Source:
        Theorem 3.4, equation 14; appendix L.
    """
    logits = token_logits(coefficients, form)
    if form.rest == "tokens":
        rest = (form.others - 2) * logits.other.exp()
    else:
        constant = torch.tensor(form.others, dtype=logits.target.dtype)
        rest = constant if form.rest == "constant" else constant.exp()
    terms = logits.target.exp() + logits.repeated.exp() + 2 * logits.side.exp() + rest
    return terms.log() - logits.target
