"""The checks of every claim on random draws, as numbers: what docs/theory.md quotes and the tests put limits to.

Random sequences have x ~ U(-1, 1), L in 5 .. 40, d in 2 .. 8, sigma log-uniform in 0.1 .. 10, slopes log-uniform in
0.01 .. 1; four sequences to a draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvshift.lab.core.seeds import generator_for
from kvshift.lab.core.statistics import mean_of
from kvshift.lab.theory import finite_model, one_layer_head, two_layer_head
from kvshift.lab.theory.gradient_flow import gradient_flow
from kvshift.lab.theory.induction_head import induction_head, random_tokens
from kvshift.lab.theory.limit_loss import Form, exact, loss, token_logits
from kvshift.lab.theory.loss_field import FIGURE2, LEVELS, Field, descend_within, loss_field
from kvshift.layers.positions import alibi_slopes

# Of the table of Monte Carlo draws: a1, a2, b1, b2.
COEFFICIENTS = ((0.0, 1.0, 1.0, 0.0), (0.3, 0.7, 0.2, 0.8), (2.0, -1.0, -1.0, 3.0), (3.0, 0.0, 0.0, 4.0))

_HEADS = 8


def check_one_layer(draws: int, seed: int = 0) -> dict[str, float]:
    """Theorem 3.3: largest errors over the draws.

    Returns:
        masked: KVSA - IH where the head attends to 2 .. L - 1; the theorem says 0.
        causal: KVSA - IH under a plain causal mask.
        relation: of `mask_gap`; it says 0.
        excess: of |KVSA - IH| over 2 (p_1 + p_L) max|x|; below 0 where the bound holds.
        layer: `KVShiftAttention` against the head, causal, at the slopes of 8 ALiBi heads.
        windowed: `KVShiftAttention` with sliding_window L - 1 against the head on 2 .. L.
        printed: the layer with the coefficients as printed, causal, against the head.
    """
    worst: dict[str, float] = {}
    for number, (x, sigma, slope) in enumerate(_draws("one layer", draws, seed)):
        length, width = x.shape[1:]
        target = induction_head(x, sigma, slope)
        masked, _ = one_layer_head.kv_shift_head(x, sigma, slope, first=2, last=length - 1)
        causal, weights = one_layer_head.kv_shift_head(x, sigma, slope)
        gap = causal - target
        limit = 2 * (weights[:, 0] + weights[:, -1]) * x.abs().amax((1, 2))

        head = number % _HEADS
        slope = alibi_slopes(_HEADS)[head]
        layer_causal, _ = one_layer_head.kv_shift_head(x, sigma, slope)
        layer_windowed, _ = one_layer_head.kv_shift_head(x, sigma, slope, first=2)
        build = partial(one_layer_head.build_layer, width, sigma, heads=_HEADS, head=head)
        outputs = {
            "layer": (layer_causal, build()),
            "windowed": (layer_windowed, build(sliding_window=length - 1)),
            "printed": (layer_causal, build(as_printed=True)),
        }
        _raise(
            worst,
            masked=(masked - target).abs().max(),
            causal=gap.abs().max(),
            relation=(gap - one_layer_head.mask_gap(x, weights, target)).abs().max(),
            excess=(gap.abs().amax(1) - limit).max(),
            **{name: (layer(x)[0][:, -1] - wanted).abs().max() for name, (wanted, layer) in outputs.items()},
        )
    return worst


def matching_tokens(batch: int, length: int, width: int, generator: torch.Generator) -> Tensor:
    """Sequences of unit vectors with a true match: x_L = x_j for one j <= L - 2, all other cosines with x_L below 0.9.

    Unit vectors, because a longer vector may look more like x_L than x_L itself. Of the `batch` that are drawn, those
    with a second near match are dropped.
    """
    x = random_tokens(batch, length, width, generator)
    x /= x.norm(dim=2, keepdim=True)
    place = torch.randint(length - 2, (batch,), generator=generator)
    x[torch.arange(batch), place] = x[:, -1]
    cosines = torch.einsum("bsd,bd->bs", x[:, :-1], x[:, -1])
    return x[(cosines > 0.9).sum(1) == 1]


def check_match(temperatures: Sequence[float], seed: int = 0) -> list[dict[str, float]]:
    """Theorem 3.3 with a plain causal mask and a true match, as sigma -> 0 and m = sigma / 10 -> 0."""
    x = matching_tokens(256, 23, 5, generator_for("theory: match", seed))
    found = []
    for sigma in temperatures:
        target = induction_head(x, sigma, sigma / 10)
        causal, _ = one_layer_head.kv_shift_head(x, sigma, sigma / 10)
        found.append({"sigma": sigma, "difference": (causal - target).abs().max().item()})
    return found


def check_two_layers(draws: int, first_slopes: Sequence[float] = (1, 2, 4, 8), seed: int = 0) -> dict[str, Any]:
    """Theorem 3.2: how near the bounds the errors come, and how they fall with p.

    Returns:
        slopes: for each p, the largest over the draws of
            copy: |y_s - x_{s-1}| over its bound, 2 e^{-p};
            derived, printed, sharp: |IH - TF| over that bound; above 1 the bound would be violated;
            error: |IH - TF|;
            error_causal: the same where layer 1 has a plain causal mask;
            unbounded: |IH - TF| over the printed bound for tokens 30 times as long; the paper does not exclude them;
            radius: the same over the derived bound for max|x| = 30.
        decay_low, decay_high: the slope of log |IH - TF| from p = 14 to 18, smallest and largest over draws in
            which d / sigma is at most 8.
        layer: two `KVShiftAttention` against `two_layer_head`, causal, largest over the draws.
    """
    rows: dict[float, dict[str, float]] = {p: {} for p in first_slopes}
    decays: list[float] = []
    layers: dict[str, float] = {}
    for number, (x, sigma, slope) in enumerate(_draws("two layers", draws, seed)):
        width = x.shape[2]
        target = induction_head(x, sigma, slope)
        for p, row in rows.items():
            copied = two_layer_head.previous_tokens(x, p)
            error = _error(x, sigma, p, slope, target)
            bounds = {
                form: error / two_layer_head.error_bound(width, sigma, p, form=form)
                for form in ("derived", "printed", "sharp")
            }
            far = 30 * x
            far_error = _error(far, sigma, p, slope, induction_head(far, sigma, slope))
            _raise(
                row,
                unbounded=far_error / two_layer_head.error_bound(width, sigma, p, form="printed"),
                radius=far_error / two_layer_head.error_bound(width, sigma, p, radius=30),
                copy=(copied[:, 1:] - x[:, :-1]).abs().max() / two_layer_head.copy_bound(p),
                **bounds,
                error=error,
                error_causal=_error(x, sigma, p, slope, target, strict=False),
            )
        if width / sigma <= 8:
            near, far = (_error(x, sigma, p, slope, target).log().item() for p in (14.0, 18.0))
            decays.append((far - near) / 4)
        first_head, head = number % _HEADS, (3 * number) % _HEADS
        made = two_layer_head.build_layers(width, sigma, heads=_HEADS, first_head=first_head, head=head)
        published = alibi_slopes(_HEADS)
        wanted, _ = two_layer_head.two_layer_head(
            x, sigma, published[first_head], published[head], first=1, last=x.shape[1]
        )
        _raise(layers, layer=(two_layer_head.run_layers(made, x) - wanted).abs().max())
    return {"slopes": rows, "decay_low": min(decays), "decay_high": max(decays), **layers}


def check_orthonormal(tokens: int, coefficients: Sequence[float]) -> dict[str, float]:
    """Theorem 3.4, U = I: the model against the closed form, largest over i = 2 .. T - 2, loss and all gradients.

    Returns:
        exact: `KVShiftAttention` and `kv_shift` against the form as derived.
        printed: `KVShiftAttention` against Table 3 (A2 for A1).
    """
    worst: dict[str, float] = {}
    embeddings = torch.eye(tokens, dtype=torch.float64).unsqueeze(0)
    point = torch.tensor(coefficients, dtype=torch.float64, requires_grad=True)
    derived, printed = (
        _with_gradient(loss(point, form), point) for form in (exact(tokens), replace(exact(tokens), side="A2"))
    )
    layer = finite_model.build_layer(tokens)
    alpha, beta = layer.shift.get_parameter("alpha"), layer.shift.get_parameter("beta")
    with torch.no_grad():
        alpha.copy_(point[None, :2])
        beta.copy_(point[None, 2:])
    for repeated in range(2, tokens - 1):
        value = finite_model.layer_loss(layer, embeddings, repeated).squeeze(0)
        gradients = torch.autograd.grad(value, (alpha, beta))
        by_layer = torch.cat([value.detach().reshape(1), *(gradient.flatten() for gradient in gradients)])
        operator = finite_model.model_loss(embeddings, repeated, point[:2], point[2:]).squeeze(0)
        by_operator = _with_gradient(operator, point)
        _raise(
            worst,
            exact=torch.maximum((by_layer - derived).abs().max(), (by_operator - derived).abs().max()),
            printed=(by_layer - printed).abs().max(),
        )
    return worst


def check_logits(tokens: int, coefficients: Sequence[float]) -> dict[str, dict[str, float]]:
    """Table 3, U = I: the logits of the model at the last position, by the kind of token as in `TokenLogits`.

    Each row:
        model: the logit, the same for i = 2 .. T - 2 and all tokens of the kind, to `spread`; no row where T = 4 has
            no others.
        derived, printed: by the form as derived, and by Table 3 (A2 for A1).
    """
    embeddings = torch.eye(tokens, dtype=torch.float64).unsqueeze(0)
    point = torch.tensor(coefficients, dtype=torch.float64)
    found: dict[str, list[float]] = {}
    for repeated in range(2, tokens - 1):
        logits = finite_model.model_logits(embeddings, repeated, point[:2], point[2:])[0].tolist()
        kinds = {repeated + 1: "target", repeated: "repeated", repeated - 1: "side", tokens: "side"}
        for token, logit in enumerate(logits, start=1):
            found.setdefault(kinds.get(token, "other"), []).append(logit)
    derived, printed = (token_logits(point, form) for form in (exact(tokens), replace(exact(tokens), side="A2")))
    return {
        kind: {
            "model": values[0],
            "spread": max(values) - min(values),
            "derived": getattr(derived, kind).item(),
            "printed": getattr(printed, kind).item(),
        }
        for kind, values in ((kind, found[kind]) for kind in derived._fields if kind in found)
    }


def check_places(tokens: int, coefficients: Sequence[float]) -> list[float]:
    """The loss with U = I for each i = 1 .. T - 1. The closed form holds from 2 to T - 2; the paper says T - 1."""
    embeddings = torch.eye(tokens, dtype=torch.float64).unsqueeze(0)
    point = torch.tensor(coefficients, dtype=torch.float64)
    return [finite_model.model_loss(embeddings, repeated, point[:2], point[2:]).item() for repeated in range(1, tokens)]


def check_monte_carlo(
    draws: int, width: int, *, tokens: int = 8, repeated: int = 4, seed: int = 0
) -> list[dict[str, Any]]:
    """Theorem 3.4 with Gaussian embeddings: mean loss beside the closed forms, for `COEFFICIENTS`.

    Each row: coefficients, mean, stderr, exact, table3 (A2 for A1), script (A2 + b2 for A2 b2 in the logit of i).
    """
    rows = []
    forms = {
        "exact": exact(tokens),
        "table3": replace(exact(tokens), side="A2"),
        "script": replace(exact(tokens), repeated="sum"),
    }
    for coefficients in COEFFICIENTS:
        generator = generator_for(f"theory: embeddings {coefficients} {width}", seed)
        estimate = mean_of(
            finite_model.draw_losses(
                coefficients, tokens=tokens, repeated=repeated, width=width, draws=draws, generator=generator
            )
        )
        point = torch.tensor(coefficients, dtype=torch.float64)
        closed = {name: loss(point, form).item() for name, form in forms.items()}
        rows.append({"coefficients": coefficients, "mean": estimate.mean, "stderr": estimate.stderr, **closed})
    return rows


def check_figure2(points: int = 101) -> list[dict[str, Any]]:
    """Figure 2, a row for each panel."""
    return [
        {"form": name, "panel": title, **check_panel(form, points)}
        for name, panels in FIGURE2.items()
        for title, form in panels.items()
    ]


def check_panel(form: Form, points: int = 101, starts: int = 21) -> dict[str, Any]:
    """One panel of Figure 2, by a grid of `points` to a side: `check_field` and

    share_caught: of `starts` x `starts`, those from which descent within the square does not end at induction.
    """
    ends = descend_within(form, starts)
    caught = float((np.abs(ends - np.array([0.0, 1.0])).max(axis=-1) > 0.05).mean())
    return {**check_field(loss_field(form, points)), "share_caught": caught}


def check_field(field: Field) -> dict[str, Any]:
    """What Figure 2 is read for.

    Returns:
        minimum, lowest, highest: the grid point of least loss, and between what the loss lies.
        corner_minima: corners (alpha1, beta1) that descent within the square does not leave; (0, 1) is induction.
        levels_crossed: how many of the 200 contour levels 0, 0.05 .. 9.95 lie in between.
        share_away: of the grid points, those where descent moves alpha1 or beta1 away from induction.
    """
    alpha1, beta1, lowest = field.minimum()
    highest = float(field.loss.max())
    corners = [
        (a, b)
        for a in (0, 1)
        for b in (0, 1)
        if (2 * a - 1) * field.alpha1_step[-b, -a] >= 0 and (2 * b - 1) * field.beta1_step[-b, -a] >= 0
    ]
    away = (field.alpha1_step > 0) | (field.beta1_step < 0)
    return {
        "minimum": (alpha1, beta1),
        "lowest": lowest,
        "highest": highest,
        "corner_minima": corners,
        "levels_crossed": int(((lowest < LEVELS) & (highest > LEVELS)).sum()),
        "share_away": float(away.mean()),
    }


def check_flow(tokens: Sequence[int] = (8, 32, 102), time: float = 10_000.0) -> list[dict[str, Any]]:
    """Where the unconstrained flow of `exact` is at `time`, from all coefficients 0.5, for each T."""
    rows = []
    for number in tokens:
        end = gradient_flow(exact(number), time=time, points=2)
        rows.append({"tokens": number, "coefficients": end.coefficients[-1].tolist(), "loss": float(end.loss[-1])})
    return rows


def _draws(purpose: str, draws: int, seed: int) -> Iterator[tuple[Tensor, float, float]]:
    """x (4, L, d), sigma and a slope; see the head of the module."""
    generator = generator_for(f"theory: {purpose}", seed)

    def between(low: float, high: float) -> float:
        return math.exp(math.log(low) + math.log(high / low) * torch.rand((), generator=generator).item())

    for _ in range(draws):
        length = int(torch.randint(5, 41, (), generator=generator))
        width = int(torch.randint(2, 9, (), generator=generator))
        yield random_tokens(4, length, width, generator), between(0.1, 10), between(0.01, 1)


def _error(x: Tensor, sigma: float, first_slope: float, slope: float, target: Tensor, strict: bool = True) -> Tensor:
    out, _ = two_layer_head.two_layer_head(x, sigma, first_slope, slope, strict=strict)
    return (out - target).abs().max()


def _with_gradient(value: Tensor, point: Tensor) -> Tensor:
    """(5,): the value and its four derivatives."""
    (gradient,) = torch.autograd.grad(value, point)
    return torch.cat([value.detach().reshape(1), gradient])


def _raise(worst: dict[str, float], **values: Tensor) -> None:
    """Raise each entry to the new value where that is larger."""
    for name, value in values.items():
        worst[name] = max(worst.get(name, -math.inf), value.detach().item())
