"""All variants by the name that a user types: what figures call each, in which color, and what refines it.

A variant's module is imported when one of its models is built or loaded; this one imports nothing that takes time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from kvshift.lab.errors import LabError

if TYPE_CHECKING:
    from kvshift.lab.variants.variant import Variant

__all__ = [
    "VARIANTS",
    "Entry",
    "find_entry",
    "find_variant",
    "label_of",
    "settled",
    "shift_label",
    "variant_of",
    "with_variant",
]

# Of a run with the options `ModelConfig` or `GPT2Options`.
_Options = TypeVar("_Options")


@dataclass(frozen=True)
class Entry:
    """A variant.

    Attributes:
        name: what a user types.
        label: in tables and figures.
        color: in all figures. The colour-blind can tell them apart.
        shifts: whether the options `shift_*` say what its layers shift.
    """

    name: str
    label: str
    color: str
    shifts: bool = False


VARIANTS: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("vanilla", "vanilla", "#0072b2"),
        Entry("kv-shift", "KV-shift", "#d55e00", shifts=True),
        Entry("smear", "smear", "#56b4e9"),
        Entry("key-offset", "key offset", "#882255"),
    )
}

# Options say these two by shift_targets alone, as they did before there were others: runs keep their digests.
_BY_TARGETS = ("vanilla", "kv-shift")


def find_entry(name: str, where: str = "variant") -> Entry:
    """The entry of that name; `where` is what a LabError calls the option."""
    if name not in VARIANTS:
        raise LabError(f"{where} must be one of {', '.join(VARIANTS)}, got {name!r}")
    return VARIANTS[name]


def find_variant(name: str, where: str = "variant") -> Variant:
    """The variant of that name: `VARIANT` of `kvshift.lab.variants.NAME`, with _ for -, which is imported."""
    return import_module(f"kvshift.lab.variants.{find_entry(name, where).name.replace('-', '_')}").VARIANT


def with_variant(options: _Options, name: str) -> _Options:
    """The options of a model with the variant of that name; what refines a shift is left out where nothing shifts.

    Args:
        options: a `ModelConfig` or `GPT2Options`.
        name: of the variant.
    """
    given: Any = options
    entry = find_entry(name)
    kept = {"variant": None if name in _BY_TARGETS else name}
    if entry.shifts:
        return replace(given, **kept, shift_targets=given.shift_targets or ("k", "v"))
    return replace(given, **kept, **dict(_refinements(given)) | {"shift_targets": ()})


def settled(options: _Options) -> _Options:
    """The options with what follows from `variant`, checked; as they are where it is None.

    Raises:
        LabError: there is no such variant, or an option of the shift contradicts it.
    """
    given: Any = options
    if given.variant is None:
        return options
    if find_entry(given.variant, "model.variant").shifts:
        if given.shift_targets == ():
            raise LabError(
                f"model.shift_targets must name at least one of q, k, v with model.variant {given.variant}, got none; "
                "the model without shift is the variant vanilla"
            )
        return with_variant(options, given.variant)
    for field, default in _refinements(given):
        value = getattr(given, field)
        if value != default and (field, value) != ("shift_targets", ()):
            raise LabError(f"model.{field} is {value!r}, but model.variant is {given.variant}, which shifts nothing")
    return with_variant(options, given.variant)


def variant_of(model: Mapping[str, Any]) -> str:
    """The name of a run's variant, from what was recorded of its model."""
    if model.get("variant") is not None:
        return model["variant"]
    return "vanilla" if model.get("shift_targets") == [] else "kv-shift"


def label_of(model: Mapping[str, Any]) -> str:
    """What tables and figures call a run's variant, from what was recorded of its model: "vanilla", "K-shift" ..."""
    name = variant_of(model)
    return shift_label(model.get("shift_targets") or "kv") if name == "kv-shift" else find_entry(name).label


def shift_label(targets: Sequence[str]) -> str:
    """What tables and figures call a model that shifts these of "q", "k", "v"."""
    return f"{''.join(targets).upper()}-shift" if targets else VARIANTS["vanilla"].label


def _refinements(options: Any) -> list[tuple[str, Any]]:
    """The fields that say how something is shifted, and their defaults."""
    return [(item.name, item.default) for item in fields(options) if item.name.startswith(("shift_", "freeze_shift"))]
