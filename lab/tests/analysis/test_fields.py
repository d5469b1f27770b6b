"""The data in Figure 2. Its look is not tested."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from kvshift_lab.analysis.fields import draw_fields, draw_flow
from kvshift_lab.theory.gradient_flow import take_steps
from kvshift_lab.theory.limit_loss import exact, script
from kvshift_lab.theory.loss_field import loss_field


def test_panels_show_levels_streams_and_induction():
    rows = {
        "exact": {"T = 4": loss_field(exact(4), 9), "T = 102": loss_field(exact(102), 9)},
        "script": {"O(T) = 100": loss_field(script(100), 9)},
    }
    with_levels, exact_102, script_100 = draw_fields(rows).axes
    assert [axes.get_title() for axes in (with_levels, exact_102, script_100)] == [
        "exact, T = 4",
        "exact, T = 102",
        "script, O(T) = 100",
    ]
    (contour,) = [drawn for drawn in with_levels.collections if hasattr(drawn, "levels")]
    assert contour.levels.tolist() == pytest.approx([1.25, 1.3, 1.35, 1.4, 1.45, 1.5])
    assert not with_levels.texts
    for axes, text in (
        (exact_102, "loss 4.61 to 4.63,\nwithin one contour interval"),
        (script_100, "loss 99.97 to 99.99,\nwithin one contour interval"),
    ):
        assert not any(hasattr(drawn, "levels") for drawn in axes.collections)
        assert [label.get_text() for label in axes.texts] == [text]
    (induction,) = with_levels.lines
    assert induction.get_xydata().tolist() == [[0, 1]]


def test_a_flow_is_four_lines_over_its_time():
    flow = take_steps(exact(8), start=(0.1, 0.2, 0.3, 0.4), learning_rate=0.25, steps=7)
    axes = Figure().add_subplot()
    draw_flow(axes, flow)
    assert axes.get_xscale() == "log"
    assert [line.get_label() for line in axes.lines] == ["$α_1$", "$α_2$", "$β_1$", "$β_2$"]
    for line, values in zip(axes.lines, flow.coefficients.T, strict=True):
        np.testing.assert_array_equal(line.get_xydata(), np.stack([flow.time[1:], values[1:]], axis=1))
