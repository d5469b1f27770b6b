"""Each cell of the table in docs/retrofit.md equals its uncached truth, or is refused by name."""

from collections.abc import Callable

import pytest

from kvshift.models import documents
from kvshift.models.cache import ShiftCacheLayer, StaticShiftCacheLayer
from kvshift.ops import torch_ops

from .matrix import CELLS, PAGE, REFUSED, SLOW, page
from .tiny_families import FAMILIES

SLOW_MARKS = (
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),  # torch's own
)


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("Llama", "Gemma 3", "GPT-2") else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
@pytest.mark.parametrize("cell", [pytest.param(cell, marks=SLOW_MARKS if cell in SLOW else ()) for cell in CELLS])
def test_cell(family: str, cell: str):
    refusal = REFUSED.get((family, cell))
    if refusal is None:
        CELLS[cell](family)
    else:
        with pytest.raises((ValueError, NotImplementedError), match=refusal):
            CELLS[cell](family)


def no_state(patch: pytest.MonkeyPatch) -> None:
    """Let every call begin as if no token preceded it."""
    for layer in (ShiftCacheLayer, StaticShiftCacheLayer):
        patch.setattr(layer, "write_shift", lambda self, state: None)


def no_padding(patch: pytest.MonkeyPatch) -> None:
    """Apply the mask in attention only. (Documents are ignored, too: positions restart after padding.)"""
    patch.setattr(documents, "padding_mask", lambda attention_mask, positions, cache=None: None)
    no_documents(patch)


def no_documents(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(documents, "document_index", lambda *_, **__: None)


def no_pairs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(documents, "pair_structure", lambda *_: (None, None))


def no_gaps(patch: pytest.MonkeyPatch) -> None:
    """Let windows count padding."""
    patch.setattr(documents, "tokens_with_gaps", lambda _: None)


def no_graph(patch: pytest.MonkeyPatch) -> None:
    """Compute the gradients of the shift without a graph."""
    patch.setattr(torch_ops, "needs_traceable_ops", lambda *_: False)


FAULTS: dict[Callable, tuple[str, ...]] = {
    no_state: ("greedy", "beam", "sampled", "left-padded", "assisted", "static cache", "chunked prefill", "LoRA"),
    no_padding: ("beam", "left-padded", "static cache", "chunked prefill", "LoRA", "save, load"),
    no_documents: ("packed",),
    no_pairs: ("4-D mask",),
    no_gaps: ("padding inside",),
    no_graph: ("second derivative",),
}


@pytest.mark.parametrize(("fault", "cell"), [(fault, cell) for fault, cells in FAULTS.items() for cell in cells])
def test_a_cell_sees_a_fault(fault: Callable, cell: str, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        CELLS[cell]("Gemma 3")


def test_the_page_has_the_table():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
