"""The data in the maps. Their look is not tested."""

import numpy as np
import pytest

from kvshift_lab.analysis.maps import coefficient_counts, count_coefficients, counts_by_layer, map_attention, map_scores

PLACES = ("previous", "earlier-1", "earlier", "earlier+1", "earlier+2")


def score(layer, head, *, moved=None, alone=0.0):
    attention = {place: 0.01 * (1 + 10 * layer + head) + 0.1 * number for number, place in enumerate(PLACES)}
    return {
        "layer": layer,
        "head": head,
        "attention": attention,
        "matched": attention,
        "moved": attention if moved is None else {**attention, **moved},
        "alone": alone,
    }


def test_scores_of_a_vanilla_model_are_shown_once():
    heads = [score(layer, head) for layer in range(2) for head in range(3)]
    *panels, _colorbar = map_scores(heads).axes
    assert [axes.get_title() for axes in panels] == [
        f"attends to and moves ${place}$" for place in ("t-1", "e", "e+1", "e+2")
    ]
    values = panels[2].images[0].get_array()
    assert values.shape == (2, 3)  # layers down, heads across
    assert values[1].tolist() == pytest.approx([0.41, 0.42, 0.43])
    assert panels[2].texts[0].get_text() == "0.31"


def test_scores_under_a_shift_say_what_is_read():
    heads = [score(0, 0), score(0, 1, moved={"earlier+1": 0.9}, alone=0.7)]
    *panels, _colorbar = map_scores(heads).axes
    titles = [axes.get_title() for axes in panels]
    assert len(titles) == 12
    assert titles[2] == "attends to $e+1$"
    assert titles[10:] == ["moves $e+1$", "matches $e$ and moves $e+1$"]
    assert panels[2].images[0].get_array().tolist() == [pytest.approx([0.31, 0.32])]
    assert panels[10].images[0].get_array().tolist() == [pytest.approx([0.31, 0.9])]
    assert panels[11].images[0].get_array().tolist() == [[0.0, 0.7]]


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


def test_attention_has_a_panel_for_each_head():
    maps = [np.eye(5), np.tril(np.full((5, 5), 0.2))]
    *panels, _colorbar = map_attention(maps, ["one", "two"], tokens=["a", "$", "\n", "d", "e"], repeat=3).axes
    assert [axes.get_title() for axes in panels] == ["one", "two"]
    for axes, values in zip(panels, maps, strict=True):
        assert np.array_equal(axes.images[0].get_array(), values)
        assert [text.get_text() for text in axes.get_xticklabels()] == ["a", r"\$", "⏎", "d", "e"]
        assert [tuple(line.get_ydata()) for line in axes.lines] == [(2.5, 2.5), (0, 1)]


def test_long_sequences_have_no_tokens_on_their_axes():
    plain, _colorbar = map_attention([np.eye(50)], ["one"], tokens=["a"] * 50).axes
    assert len(plain.get_xticks()) < 50
    assert not plain.lines
