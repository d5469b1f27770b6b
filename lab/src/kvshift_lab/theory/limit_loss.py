"""Theorem 3.4 and Table 3: the loss of learning induction in closed form, as derived and as printed.

The model is one head with KV shift and identity projections, without residual, MLP, norm, positions or a factor
1 / sqrt(d) in the scores. Its input is T distinct tokens x_1 .. x_T, followed by x_{T+1} = x_i. The loss is that of the
last position, whose target is x_{i+1}. The T tokens are the vocabulary, with tied embeddings that become orthonormal as
d grows. With

    S = 2 e^{a1} + e^{a2} + (T - 2),    A1 = e^{a1} / S,    A2 = e^{a2} / S

the last token attends to i and to itself with weight A1 each, to i + 1 with A2, to all others with 1 / S. Hence, for
2 <= i <= T - 2, the logits are

    token           derived                    Table 3               plotting script (appendix L)
    i + 1           A2 b1 + b2 / S             the same              the same
    i               2 A1 b1 + A2 b2            the same              2 A1 b1 + A2 + b2
    i - 1 and T     b1 / S + A1 b2             b1 / S + A2 b2        b1 / S + A2 b2
    T - 4 others    (b1 + b2) / S              the same              -

    L = -log( e^{l_{i+1}} / ( e^{l_{i+1}} + e^{l_i} + 2 e^{l_{i-1}} + rest ) )

    rest            (T - 4) e^{(b1 + b2) / S}  O(T), a constant c    e^c
    in S            T - 2                      c                     c

The A2 of Table 3 is an error: the proof above the table has b2 e^{a1}. (By the shift, b2 times token i - 1 is part of
the value of token i, which has weight A1. The same holds for token T and token T + 1.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Form:
    """A formula of the loss, given by the four choices in which derivation, theorem and script differ."""

    others: float
    """Last term of S, after 2 e^{a1} + e^{a2}: T - 2 as derived, or the constant c that replaces O(T) of the paper."""
    side: Literal["A1", "A2"] = "A1"
    """Weight that multiplies b2 in the logits of tokens i - 1 and T; A1 as derived."""
    repeated: Literal["product", "sum"] = "product"
    """Last term in the logit of token i: A2 b2 as derived ("product"), or A2 + b2 ("sum")."""
    rest: Literal["tokens", "constant", "exponential"] = "tokens"
    """Term of the other tokens in the denominator: (T - 4) e^{(b1 + b2) / S} as derived, c, or e^c."""

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
    """Logit of token i + 1."""
    repeated: Tensor
    """Logit of token i."""
    side: Tensor
    """Logit of each of the tokens i - 1 and T."""
    other: Tensor
    """Logit of each of the T - 4 other tokens."""


def exact(tokens: int) -> Form:
    """Return the formula as derived, for T >= 4 distinct tokens."""
    if tokens < 4:
        raise ValueError(f"tokens must be at least 4, for i - 1, i, i + 1 and T to differ; got {tokens}")
    return Form(others=tokens - 2)


def paper(constant: float) -> Form:
    """Return the formula as printed in Theorem 3.4, with O(T) = c wherever it occurs."""
    return Form(others=constant, side="A2", rest="constant")


def script(constant: float) -> Form:
    """Return the formula that the script in appendix L computes, with ot = c."""
    return Form(others=constant, side="A2", repeated="sum", rest="exponential")


def token_logits(coefficients: Tensor, form: Form) -> TokenLogits:
    """Return the logits of Table 3; see the module docstring.

    Args:
        coefficients: a1, a2, b1, b2 in the last dimension, (..., 4).
        form: formula of the loss.

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
    """Return the loss L in nats; see the module docstring.

    Args:
        coefficients: a1, a2, b1, b2 in the last dimension, (..., 4).
        form: formula of the loss.

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
