"""Figure 2: the loss of Theorem 3.4 and its descent directions on the square a2 = 1 - a1, b2 = 1 - b1.

The three rows are the formulas `exact`, `paper` and `script` of `limit_loss`. The three columns are O(T) = 0, 10, 100,
or in the row `exact` T = 4 (the least that the derivation allows), 12 and 102. `lab.analysis.fields` plots them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvshift_lab.theory.limit_loss import Form, exact, loss, paper, script

# The title and formula of each panel, by the rows of the figure.
FIGURE2: Mapping[str, Mapping[str, Form]] = {
    "exact": {f"T = {tokens}": exact(tokens) for tokens in (4, 12, 102)},
    "paper": {f"O(T) = {constant}": paper(constant) for constant in (0, 10, 100)},
    "script": {f"O(T) = {constant}": script(constant) for constant in (0, 10, 100)},
}

# The contour levels of the script in appendix L, in nats.
LEVELS = np.arange(0, 10, 0.05)


@dataclass(frozen=True)
class Field:
    """Loss and descent direction on a grid of n x n points.

    Attributes:
        alpha1, beta1: (n,), the coordinates; alpha2 = 1 - alpha1, beta2 = 1 - beta1.
        loss: (n, n), in nats; beta1 varies over rows, alpha1 over columns.
        alpha1_step, beta1_step: the components of -grad L within the square, (n, n).
    """

    alpha1: np.ndarray
    beta1: np.ndarray
    loss: np.ndarray
    alpha1_step: np.ndarray
    beta1_step: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """Return the arrays as lists of numbers."""
        return {name: values.tolist() for name, values in vars(self).items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Field:
        """Create a field from the output of `to_json`."""
        return cls(**{name: np.array(values) for name, values in record.items()})

    def minimum(self) -> tuple[float, float, float]:
        """Return (alpha1, beta1, loss) at the grid point with the lowest loss."""
        row, column = np.unravel_index(self.loss.argmin(), self.loss.shape)
        return float(self.alpha1[column]), float(self.beta1[row]), float(self.loss[row, column])


def loss_field(form: Form, points: int = 101) -> Field:
    """Compute loss and descent direction on [0, 1]^2.

    Args:
        form: formula of the loss.
        points: n, the number of points per side, at least 2. The script in appendix L uses 1000.
    """
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    side = torch.linspace(0, 1, points, dtype=torch.float64)
    beta1, alpha1 = (axis.requires_grad_() for axis in torch.meshgrid(side, side, indexing="ij"))
    values = loss(_coefficients(alpha1, beta1), form)
    steps = torch.autograd.grad(-values.sum(), (alpha1, beta1))
    return Field(side.numpy(), side.numpy(), values.detach().numpy(), steps[0].numpy(), steps[1].numpy())


def descend_within(form: Form, points: int = 21, *, length: float = 0.01, steps: int = 400) -> np.ndarray:
    """Return where descent within the square ends for starts on a grid, (n, n, 2); the last axis is alpha1, beta1.

    Each step has the given length along -grad L and is clipped to the square, so that descent continues along an edge.
    By default, the steps sum to four sides of the square, and all paths end within a step or two of their limit.
    """
    side = torch.linspace(0, 1, points, dtype=torch.float64)
    place = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1)
    for _ in range(steps):
        place.requires_grad_()
        value = loss(_coefficients(*place.unbind(-1)), form).sum()
        (gradient,) = torch.autograd.grad(value, place)
        place = (place.detach() - length * torch.nn.functional.normalize(gradient, dim=-1)).clamp(0, 1)
    return place.numpy()


def figure2_fields(points: int = 101) -> dict[str, dict[str, Field]]:
    """Compute the field of every panel of `FIGURE2`."""
    return {row: {title: loss_field(form, points) for title, form in panels.items()} for row, panels in FIGURE2.items()}


def _coefficients(alpha1: Tensor, beta1: Tensor) -> Tensor:
    return torch.stack([alpha1, 1 - alpha1, beta1, 1 - beta1], dim=-1)
