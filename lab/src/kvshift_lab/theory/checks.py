"""Numerical checks of every claim on random draws; docs/theory.md quotes the numbers, and tests bound them.

Random sequences have x ~ U(-1, 1), L in 5 .. 40, d in 2 .. 8, sigma log-uniform in 0.1 .. 10, and slopes log-uniform in
0.01 .. 1. Each draw has four sequences.
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

from kvshift_lab.core.seeds import generator_for
from kvshift_lab.core.statistics import mean_of
from kvshift_lab.theory import finite_model, one_layer_head, two_layer_head
from kvshift_lab.theory.gradient_flow import gradient_flow
from kvshift_lab.theory.induction_head import induction_head, random_tokens
from kvshift_lab.theory.limit_loss import Form, exact, loss, token_logits
from kvshift_lab.theory.loss_field import FIGURE2, LEVELS, Field, descend_within, loss_field

# The coefficients a1, a2, b1, b2 at which Theorem 3.4 is checked.
COEFFICIENTS = ((0.0, 1.0, 1.0, 0.0), (0.3, 0.7, 0.2, 0.8), (2.0, -1.0, -1.0, 3.0), (3.0, 0.0, 0.0, 4.0))

_HEADS = 8
_SLOPES = [2.0 ** (-8 * (head + 1) / _HEADS) for head in range(_HEADS)]  # of ALiBi, as published


def check_one_layer(draws: int, seed: int = 0) -> dict[str, float]:
    """Check Theorem 3.3: the largest errors over the draws.

    Returns:
        masked: |KVSA - IH| if the head attends to 2 .. L - 1; 0 by the theorem.
        causal: |KVSA - IH| under a plain causal mask.
        relation: difference between KVSA - IH and `mask_gap`; 0 by its formula.
        excess: |KVSA - IH| minus 2 (p_1 + p_L) max|x|; negative if the bound holds.
        layer: difference between `KVShiftAttention` and the head, both causal, at the slopes of 8 ALiBi heads.
        windowed: difference between `KVShiftAttention` with sliding_window L - 1 and the head on 2 .. L.
        printed: difference between the layer with the coefficients as printed and the head, both causal.
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
        slope = _SLOPES[head]
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
    """Draw sequences of unit vectors with one match: x_L = x_j for a j <= L - 2, and other cosines with x_L below 0.9.

    They are unit vectors because a longer vector may have a larger product with x_L than x_L itself. Sequences with a
    second near match are dropped, so fewer than `batch` may be returned.
    """
    x = random_tokens(batch, length, width, generator)
    x /= x.norm(dim=2, keepdim=True)
    place = torch.randint(length - 2, (batch,), generator=generator)
    x[torch.arange(batch), place] = x[:, -1]
    cosines = torch.einsum("bsd,bd->bs", x[:, :-1], x[:, -1])
    return x[(cosines > 0.9).sum(1) == 1]


def check_match(temperatures: Sequence[float], seed: int = 0) -> list[dict[str, float]]:
    """Check Theorem 3.3 with a plain causal mask and `matching_tokens`, as sigma -> 0 and m = sigma / 10 -> 0."""
    x = matching_tokens(256, 23, 5, generator_for("theory: match", seed))
    found = []
    for sigma in temperatures:
        target = induction_head(x, sigma, sigma / 10)
        causal, _ = one_layer_head.kv_shift_head(x, sigma, sigma / 10)
        found.append({"sigma": sigma, "difference": (causal - target).abs().max().item()})
    return found


def check_two_layers(draws: int, first_slopes: Sequence[float] = (1, 2, 4, 8), seed: int = 0) -> dict[str, Any]:
    """Check Theorem 3.2: how close the errors are to their bounds, and how they decay with p.

    Returns:
        slopes: for each p, the largest values over the draws of
            copy: |y_s - x_{s-1}| divided by its bound, 2 e^{-p};
            derived, printed, sharp: |IH - TF| divided by this bound, which would be violated above 1;
            error: |IH - TF|;
            error_causal: |IH - TF| if layer 1 has a plain causal mask;
            unbounded: |IH - TF| divided by the printed bound, for tokens 30 times as long, which the paper allows;
            radius: |IH - TF| for the same tokens, divided by the derived bound for max|x| = 30.
        decay_low, decay_high: the smallest and largest slope of log |IH - TF| from p = 14 to 18, over the draws with
            d / sigma <= 8.
        layer: largest difference over the draws between two `KVShiftAttention` and `two_layer_head`, both causal.
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
        wanted, _ = two_layer_head.two_layer_head(
            x, sigma, _SLOPES[first_head], _SLOPES[head], first=1, last=x.shape[1]
        )
        _raise(layers, layer=(two_layer_head.run_layers(made, x) - wanted).abs().max())
    return {"slopes": rows, "decay_low": min(decays), "decay_high": max(decays), **layers}


def check_orthonormal(tokens: int, coefficients: Sequence[float]) -> dict[str, float]:
    """Check Theorem 3.4 with U = I: largest differences in loss and gradients from the closed form, i = 2 .. T - 2.

    Returns:
        exact: difference of `KVShiftAttention` and `kv_shift` from the formula as derived.
        printed: difference of `KVShiftAttention` from Table 3 (A2 in place of A1).
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
    """Check Table 3 with U = I: logits of the model at the last position, for each kind of token in `TokenLogits`.

    Each kind, except "other" if T = 4, has the entries
        model, spread: a logit, and the range of the logits for i = 2 .. T - 2 and all tokens of the kind.
        derived, printed: the logit by the formula as derived, and by Table 3 (A2 in place of A1).
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


def check_positions(tokens: int, coefficients: Sequence[float]) -> list[float]:
    """Return the loss with U = I for i = 1 .. T - 1.

    The closed form holds for 2 <= i <= T - 2. The paper states 1 < i < T instead.
    """
    embeddings = torch.eye(tokens, dtype=torch.float64).unsqueeze(0)
    point = torch.tensor(coefficients, dtype=torch.float64)
    return [finite_model.model_loss(embeddings, repeated, point[:2], point[2:]).item() for repeated in range(1, tokens)]


def check_monte_carlo(
    draws: int, width: int, *, tokens: int = 8, repeated: int = 4, seed: int = 0
) -> list[dict[str, Any]]:
    """Check Theorem 3.4 with Gaussian embeddings: the mean loss and the closed forms, at each of `COEFFICIENTS`.

    Rows have coefficients, mean, stderr, exact, table3 (A2 for A1) and script (A2 + b2 for A2 b2 in the logit of i).
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
    """Check Figure 2; return a row for each panel."""
    return [
        {"form": name, "panel": title, **check_panel(form, points)}
        for name, panels in FIGURE2.items()
        for title, form in panels.items()
    ]


def check_panel(form: Form, points: int = 101, starts: int = 21) -> dict[str, Any]:
    """Check one panel of Figure 2 on a grid with `points` per side: the values of `check_field`, and share_caught.

    share_caught is the share of `starts` x `starts` points from which descent within the square does not end at
    induction.
    """
    ends = descend_within(form, starts)
    caught = float((np.abs(ends - np.array([0.0, 1.0])).max(axis=-1) > 0.05).mean())
    return {**check_field(loss_field(form, points)), "share_caught": caught}


def check_field(field: Field) -> dict[str, Any]:
    """Return the features of a panel of Figure 2.

    Returns:
        minimum, lowest, highest: the grid point with the lowest loss, and the lowest and highest loss.
        corner_minima: corners (alpha1, beta1) that descent within the square does not leave; (0, 1) is induction.
        levels_crossed: number of the 200 contour levels 0, 0.05 .. 9.95 between the lowest and highest loss.
        share_away: share of the grid points at which descent moves alpha1 or beta1 away from induction.
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
    """Return the end of the unconstrained flow of `exact` at `time`, started at coefficients of 0.5, for each T."""
    rows = []
    for number in tokens:
        end = gradient_flow(exact(number), time=time, points=2)
        rows.append({"tokens": number, "coefficients": end.coefficients[-1].tolist(), "loss": float(end.loss[-1])})
    return rows


def _draws(purpose: str, draws: int, seed: int) -> Iterator[tuple[Tensor, float, float]]:
    """Yield x (4, L, d), sigma and a slope for each draw; see the module docstring."""
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
    """Return the value and its four derivatives, (5,)."""
    (gradient,) = torch.autograd.grad(value, point)
    return torch.cat([value.detach().reshape(1), gradient])


def _raise(worst: dict[str, float], **values: Tensor) -> None:
    """Replace each entry by the new value if that is larger."""
    for name, value in values.items():
        worst[name] = max(worst.get(name, -math.inf), value.detach().item())
