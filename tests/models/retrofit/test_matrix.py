"""Each cell of the table in docs/retrofit.md: it equals its uncached truth, or is refused by name."""

import pytest

from .matrix import CELLS, PAGE, REFUSED, SLOW, page
from .tiny_families import FAMILIES

SLOW_MARKS = (
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),  # torch's own
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cell", [pytest.param(cell, marks=SLOW_MARKS if cell in SLOW else ()) for cell in CELLS])
def test_cell(family: str, cell: str):
    refusal = REFUSED.get((family, cell))
    if refusal is None:
        CELLS[cell](family)
    else:
        with pytest.raises((ValueError, NotImplementedError), match=refusal):
            CELLS[cell](family)


def test_the_page_has_the_table():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
