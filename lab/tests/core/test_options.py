"""Metadata of option fields: what enters a hash, what is compared, and what is written to files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import (
    ADDED_LATER,
    MACHINE_SPECIFIC,
    NO_EFFECT_ON_RESULTS,
    differences,
    from_json,
    options_hash,
    to_json,
)


@dataclass(frozen=True, kw_only=True)
class Strings:
    """A group of options."""

    gauge: tuple[float, ...] = (0.25, 0.5)
    coating: str | None = field(default=None, metadata=ADDED_LATER)


@dataclass(frozen=True, kw_only=True)
class Lute:
    """Options with every kind of metadata."""

    case: Path = field(default=Path("attic"), metadata=MACHINE_SPECIFIC)
    polish: int = field(default=1, metadata=NO_EFFECT_ON_RESULTS)
    courses: int = 7
    capo: int | None = field(default=None, metadata=ADDED_LATER)
    strings: Strings = field(default_factory=Strings)


LUTE = Lute()
HASH = options_hash(Lute, to_json(LUTE))


@pytest.mark.parametrize("changed", [{"case": Path("cellar")}, {"polish": 3}])
def test_what_decides_nothing_enters_neither_hash_nor_comparison(changed: dict) -> None:
    values = to_json(replace(LUTE, **changed))
    assert options_hash(Lute, values) == HASH
    assert differences(Lute, to_json(LUTE), values) == {}


@pytest.mark.parametrize(
    "changed", [{"courses": 6}, {"capo": 2}, {"strings": Strings(gauge=(0.5,))}, {"strings": Strings(coating="gut")}]
)
def test_what_decides_numbers_enters_both(changed: dict) -> None:
    values = to_json(replace(LUTE, **changed))
    assert options_hash(Lute, values) != HASH
    assert len(differences(Lute, to_json(LUTE), values)) == 1


def test_an_option_that_came_late_leaves_older_hashes_as_they_are() -> None:
    older = to_json(LUTE)
    del older["capo"], older["strings"]["coating"]
    assert options_hash(Lute, older) == HASH
    assert differences(Lute, older, to_json(LUTE) | {"capo": False}) == {}
    assert differences(Lute, older, to_json(replace(LUTE, strings=Strings(coating="gut")))) == {
        "strings.coating": "strings.coating: recorded None, given 'gut'"
    }


def test_options_come_back_from_json_and_what_is_of_one_call_is_not_written() -> None:
    lute = replace(LUTE, capo=2, strings=Strings(gauge=(0.1, 0.2)))
    values = to_json(lute)
    assert "again" not in values
    assert from_json(Lute, values) == lute
    with pytest.raises(LabError, match=r"unknown field strings\.weight; known: gauge, coating"):
        from_json(Lute, {"strings": {"weight": 1}})


def test_an_option_that_is_gone_counts_only_where_it_had_an_effect() -> None:
    values = to_json(LUTE)
    assert options_hash(Lute, {**values, "tune": None}) == HASH
    assert differences(Lute, {**values, "tune": None}, values) == {}
    assert from_json(Lute, {**values, "tune": None}) == LUTE
    within = {**values, "strings": {**values["strings"], "repeated_spans": None}}
    assert options_hash(Lute, within) == HASH
    assert differences(Lute, within, values) == {}
    assert from_json(Lute, within) == LUTE
    with pytest.raises(LabError, match=r"unknown field strings\.repeated_spans"):
        from_json(Lute, {"strings": {"repeated_spans": 0.3}})
    assert differences(Lute, {**values, "tune": "lora"}, values) == {"tune": "tune: recorded 'lora', given None"}
