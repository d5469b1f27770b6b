"""Gradient descent on the loss of Theorem 3.4 with all four coefficients free.

    d(a1, a2, b1, b2) / dt = -grad L

Figure 2 shows the square a2 = 1 - a1, b2 = 1 - b1. Training may leave it, because the paper constrains only the initial
values. Time is the learning rate times the number of steps of plain gradient descent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvshift_lab.theory.limit_loss import Form, loss


@dataclass(frozen=True)
class Trajectory:
    """The points along a descent.

    Attributes:
        time: learning rate times steps, (n,).
        coefficients: (n, 4), columns a1, a2, b1, b2.
        loss: nats, (n,).
    """

    time: np.ndarray
    coefficients: np.ndarray
    loss: np.ndarray


def loss_and_gradient(coefficients: Sequence[float] | np.ndarray, form: Form) -> tuple[float, np.ndarray]:
    """Return L and its gradient (4,) at the coefficients a1, a2, b1, b2."""
    point = torch.tensor(np.asarray(coefficients), dtype=torch.float64, requires_grad=True)
    value = loss(point, form)
    (gradient,) = torch.autograd.grad(value, point)
    return value.item(), gradient.numpy()


def take_steps(
    form: Form, *, start: Sequence[float] = (0.5,) * 4, learning_rate: float = 0.5, steps: int
) -> Trajectory:
    """Run plain gradient descent and return the start and the point after every step."""
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be above 0, got {learning_rate}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    point, points, losses = np.asarray(start, dtype=float), [], []
    for _ in range(steps):
        value, gradient = loss_and_gradient(point, form)
        points.append(point)
        losses.append(value)
        point = point - learning_rate * gradient
    points.append(point)
    losses.append(loss_and_gradient(point, form)[0])
    return Trajectory(learning_rate * np.arange(steps + 1), np.stack(points), np.array(losses))


def gradient_flow(form: Form, *, time: float = 10_000.0, points: int = 200) -> Trajectory:
    """Solve the flow that starts at coefficients of 0.5, with scipy's LSODA to a relative error of 1e-8.

    This takes about a thousand evaluations of the gradient, where gradient descent takes 20,000 steps.

    Args:
        form: formula of the loss.
        time: final time.
        points: number of rows of the trajectory, at least 2: time 0, then times evenly spaced in the logarithm from a
            thousandth of `time` to `time`. With 2, the rows are the start and the end.
    """
    from scipy.integrate import solve_ivp  # takes half a second to import

    if not time > 0:
        raise ValueError(f"time must be above 0, got {time}")
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    times = np.concatenate([[0.0], np.geomspace(time / 1000, time, points - 1)])
    times[-1] = time  # geomspace may end above it by a rounding error, which the solver rejects
    solution = solve_ivp(
        lambda _, point: -loss_and_gradient(point, form)[1],
        (0.0, time),
        np.full(4, 0.5),
        method="LSODA",
        t_eval=times,
        rtol=1e-8,
        atol=1e-10,
    )
    if not solution.success:
        raise ArithmeticError(f"the flow could not be integrated to time {time}: {solution.message}")
    coefficients = solution.y.T
    return Trajectory(solution.t, coefficients, np.array([loss_and_gradient(row, form)[0] for row in coefficients]))
