"""Seeds: every run that was made depends on their bits, which must not change."""

import pytest

from kvshift_lab.core.seeds import generator_for, seed_for
from kvshift_lab.tasks import batch_generator


@pytest.mark.parametrize(
    ("purpose", "seed", "expected"),
    [("order of rows", 0, 2326828175), ("shift coefficients", 7, 248578360), ("generate from 3", 11, 844932362)],
)
def test_the_seed_of_a_purpose_is_what_it_has_been(purpose: str, seed: int, expected: int) -> None:
    assert seed_for(purpose, seed) == generator_for(purpose, seed).initial_seed() == expected


@pytest.mark.parametrize(
    ("split", "seed", "number", "expected"),
    [
        ("training", 0, 0, 400364778),
        ("evaluation", 0, 0, 2547848426),
        ("training", 5, 3, 1611050171),
        ("evaluation", 11, 2**31 - 1, 2837287625),
    ],
)
def test_the_seed_of_a_batch_is_what_it_has_been(split: str, seed: int, number: int, expected: int) -> None:
    assert batch_generator(split, seed, number).initial_seed() == expected
