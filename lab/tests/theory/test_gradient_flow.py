"""Gradient descent without the constraint of Figure 2."""

import numpy as np
import pytest

from kvshift_lab.theory.gradient_flow import gradient_flow, loss_and_gradient, take_steps
from kvshift_lab.theory.limit_loss import exact


def test_gradient_is_the_slope():
    point, h = np.array([0.3, 0.7, 0.2, 0.8]), 1e-6
    _, gradient = loss_and_gradient(point, exact(8))
    for index in range(4):
        step = h * np.eye(4)[index]
        slope = (loss_and_gradient(point + step, exact(8))[0] - loss_and_gradient(point - step, exact(8))[0]) / (2 * h)
        assert gradient[index] == pytest.approx(slope, abs=1e-9)


def test_one_step_is_the_gradient_times_the_rate():
    start = (0.1, 0.2, 0.3, 0.4)
    found = take_steps(exact(8), start=start, learning_rate=0.25, steps=1)
    value, gradient = loss_and_gradient(start, exact(8))
    np.testing.assert_array_equal(found.coefficients, [start, np.array(start) - 0.25 * gradient])
    assert found.time.tolist() == [0, 0.25]
    assert found.loss[0] == value


def test_steps_approach_the_flow_as_they_shrink():
    end = gradient_flow(exact(8), time=8.0, points=2).coefficients[-1]
    errors = [
        np.abs(take_steps(exact(8), learning_rate=8.0 / steps, steps=steps).coefficients[-1] - end).max()
        for steps in (64, 128, 256)
    ]
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.1)
    assert errors[1] / errors[2] == pytest.approx(2, abs=0.05)


def test_free_coefficients_leave_the_square_towards_induction():
    found = gradient_flow(exact(32))
    assert found.time[[0, -1]].tolist() == [0, 10_000]
    assert found.coefficients[0].tolist() == [0.5] * 4
    assert (np.diff(found.loss) < 0).all()
    a1, a2, b1, b2 = found.coefficients[-1]
    assert (a2, b1) == pytest.approx((7.8, 12.8), abs=0.05)
    assert abs(a1) < 0.1
    assert abs(b2) < 0.05
    assert found.loss[-1] == pytest.approx(1e-4, rel=0.01)
    assert (np.diff(found.coefficients[10:, 1:3], axis=0) > 0).all()  # a2 and b1 keep rising
