"""The data in the maps. Their look is not tested."""

import numpy as np
import pytest

from kvshift_lab.analysis.maps import coefficient_counts, count_coefficients, counts_by_layer, map_coefficients


def test_coefficients_are_counted_as_in_table_5():
    now, before, even = [0.9, 0.1], [-0.9, 0.1], [0.5, 0.5]
    layers = [{"alpha": [now, now, before], "beta": [now, before, now]}, {"alpha": [now, even], "beta": [now, before]}]
    assert count_coefficients(layers) == {
        "alpha1 > alpha2": {"beta1 > beta2": 2, "beta1 <= beta2": 1},
        "alpha1 <= alpha2": {"beta1 > beta2": 1, "beta1 <= beta2": 1},
    }


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [{"alpha": [[1.0, 0.0]]}],
        [{"beta": [[1.0, 0.0]]}],
        [{"alpha": [[1.0, 0.0, 0.0]], "beta": [[1.0, 0.0, 0.0]]}],
    ],
)
def test_other_shifts_have_no_such_table(layers):
    assert count_coefficients(layers) is None


def test_layers_may_have_different_numbers_of_heads():
    figure = map_coefficients([{"alpha": [[0.5, 0.25]]}, {"alpha": [[1.0, 0.0], [0.75, 0.125]]}])
    assert figure is not None
    maps = [np.ma.filled(axes.images[0].get_array(), np.nan) for axes in figure.axes[:2]]
    np.testing.assert_equal(maps, [[[0.5, np.nan], [1.0, 0.75]], [[0.25, np.nan], [0.0, 0.125]]])
    assert all(list(axes.get_xticks()) == [0, 1] for axes in figure.axes[:2])


def test_signs_and_sums_are_counted():
    layers = [
        {"alpha": [[0.9, 0.1], [0.5, -0.25]], "beta": [[-0.5, 0.5], [1.5, 0.5]]},
        {"alpha": [[-0.1, -0.9]], "beta": [[0.5, 0.5]]},
    ]
    found = coefficient_counts(layers)
    assert found is not None
    assert [found[f"negative {name}"] for name in ("alpha1", "alpha2", "beta1", "beta2")] == [1, 2, 1, 0]
    # The sums are 1, 0.25, -1 for alpha, and 0, 2, 1 for beta.
    assert found["distance of alpha1 + alpha2 from 1"] == pytest.approx((0 + 0.75 + 2) / 3)
    assert found["distance of beta1 + beta2 from 1"] == pytest.approx((1 + 1 + 0) / 3)
    assert sum(found[f"alpha1 {a} alpha2, beta1 {b} beta2"] for a in (">", "<=") for b in (">", "<=")) == 3
    assert coefficient_counts([{"alpha": [[1.0, 0.0]]}]) is None


def test_counts_of_layers_add_up_to_those_of_all():
    layers = [
        {"alpha": [[0.9, 0.1], [0.5, -0.25]], "beta": [[-0.5, 0.5], [1.5, 0.5]]},
        {"alpha": [[-0.1, -0.9]], "beta": [[0.5, 0.5]]},
    ]
    found = counts_by_layer(layers)
    assert found is not None
    assert list(found) == ["0", "1", "all"]
    assert found["0"]["negative alpha2"] == found["1"]["negative alpha2"] == 1
    for name, number in found["all"].items():
        if "distance" not in name:
            assert found["0"][name] + found["1"][name] == number
    assert found["all"]["distance of alpha1 + alpha2 from 1"] == pytest.approx((2 * 0.375 + 2) / 3)
    assert counts_by_layer([]) is None
