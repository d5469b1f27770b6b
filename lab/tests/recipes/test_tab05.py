"""Table 5: the counts of coefficients, the verdicts on them, the table and the figure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvshift_lab.analysis.maps import coefficient_counts
from kvshift_lab.recipes.catalogue import find_recipe
from kvshift_lab.recipes.language_models.settings import GridPoint, arm_at
from kvshift_lab.recipes.tab05.study import CELLS
from kvshift_lab.study.recipe import Record

from ..study.cases import made_up

RECIPE = find_recipe("tab05")
NOW, BEFORE = [0.9, 0.1], [-0.1, 0.5]


def record(alike: int, seed: int, *, size: str | None = "2.9B") -> Record:
    """Return a run of four layers with five heads: of 20 heads, ten start on the diagonal and `alike` end there."""

    point = GridPoint(4, 128)

    def layers(count: int) -> list[dict[str, list[list[float]]]]:
        values = [NOW if number < count else BEFORE for number in range(20)]
        return [{"alpha": [NOW] * 5, "beta": values[5 * at : 5 * at + 5]} for at in range(4)]

    start, end = (coefficient_counts(layers(count)) or {} for count in (10, alike))
    model = {"size": size, "num_hidden_layers": point.layers}
    options = {"model": model, "data": {"sequence_length": point.length}, "steps": 200}
    curve = {"step": [100, 200], "loss": [4.0, 3.0], **{name: [start[name], end[name]] for name in start}}
    return made_up(arm_at(point, "kv-shift"), seed, curve=curve, options=options, coefficients=layers(alike))


@pytest.mark.parametrize(
    ("alike", "direction"), [([16, 17, 15], "holds"), ([4, 5, 3], "fails"), ([4, 16, 10], "not shown")]
)
def test_whether_the_diagonal_dominates(alike: list[int], direction: str) -> None:
    (claim,) = RECIPE.claims([record(count, seed) for seed, count in enumerate(alike)])
    assert claim.direction == direction


def test_a_miniature_decides_nothing_whatever_it_counts() -> None:
    for counts in ([16, 17, 15], [4, 5, 3]):
        (claim,) = RECIPE.claims([record(count, seed, size=None) for seed, count in enumerate(counts)])
        assert claim.direction == "not testable here"
        assert claim.note.startswith("after 200 steps the coefficients are near their start values; ")


def test_runs_that_diverged_are_left_out() -> None:
    good = [record(count, seed) for seed, count in enumerate((16, 17, 15))]
    bad = replace(record(0, 3), result={"diverged_at": 7}, curve={"step": [], "loss": []})
    assert RECIPE.claims([*good, bad]) == RECIPE.claims(good)
    assert RECIPE.claims([bad])[0].direction == "not shown"
    assert RECIPE.tables is not None
    assert "of 3 seeds" in RECIPE.tables([*good, bad])


def test_the_table_counts_by_layer_over_seeds() -> None:
    assert RECIPE.tables is not None
    text = RECIPE.tables([record(16, 0), record(17, 1)])
    rows = {line.split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in text.splitlines()}
    assert rows["| 0"][:4] == ["10", "0", "0", "0"]
    assert rows["| 3"] == ["3", "0", "7", "0", "0", "0", "7", "0", "0.000", f"{(4 + 3) * 0.6 / 10:.3f}"]
    assert rows["| all"][:4] == ["33", "0", "7", "0"]
    assert rows["| the paper's 2.9B"] == [str(count) for count in CELLS.values()]
    assert sum(CELLS.values()) == 128
