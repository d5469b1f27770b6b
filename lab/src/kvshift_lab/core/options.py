"""Options: frozen dataclasses whose fields have metadata on how an option affects a run.

By default an option affects the results of a run. The metadata of a field declare anything else:

    report_to: tuple[str, ...] = field(default=("tensorboard",), metadata=MACHINE_SPECIFIC)

The metadata determine the hash of a run, the options with which it can be resumed, and the options that are recorded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
from collections.abc import Mapping, Set
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvshift_lab.core.errors import LabError


class OptionTrait(Enum):
    """Properties of an option."""

    NO_EFFECT_ON_RESULTS = "no computed number depends on it: it may differ between a run and its continuation"
    MACHINE_SPECIFIC = "it depends on the machine: the records of a study do not include it"
    ADDED_LATER = "older runs do not have it: None does not enter the hash, and equals False and a missing entry"
    VARIES_BY_VARIANT = "it may differ between the variants of a comparison"
    NOT_IN_MODEL_CONFIG = "the configuration of the model has no field of this name"


def option_metadata(*traits: OptionTrait) -> dict[str, bool]:
    """Return the metadata of a field with these properties."""
    return {trait.name: True for trait in traits}


NO_EFFECT_ON_RESULTS = option_metadata(OptionTrait.NO_EFFECT_ON_RESULTS)
MACHINE_SPECIFIC = option_metadata(OptionTrait.NO_EFFECT_ON_RESULTS, OptionTrait.MACHINE_SPECIFIC)
ADDED_LATER = option_metadata(OptionTrait.ADDED_LATER)

RECORDED = ("config_hash", "data_facts", "extended")
"""Entries that a run records in addition to its options; "extended" stands in older records."""

REMOVED = frozenset({"tune", "lora_rank", "repeated_spans"})
"""Options of older runs, which had no effect where they were None; elsewhere, such a run cannot be continued."""


def is_removed(name: str, value: Any) -> bool:
    """Return True for an option of an older run that had no effect. Its name may include its group: "data.corpus"."""
    return value is None and name.rpartition(".")[2] in REMOVED


@cache
def option_names(options: type, trait: OptionTrait) -> frozenset[str]:
    """Return the names of the fields of a dataclass that have this property."""
    return frozenset(item.name for item in dataclasses.fields(options) if item.metadata.get(trait.name))


@cache
def _groups(options: type) -> Mapping[str, type]:
    """Return the fields of a dataclass that are groups of options, with their dataclasses."""
    hints = get_type_hints(options)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)}


def options_hash(options: type, values: Mapping[str, Any]) -> str:
    """Return a hash, as 16 hexadecimal digits, of all options that affect results.

    Args:
        options: the dataclass whose metadata describe the options; values of unknown names enter the hash.
        values: values of the options, as returned by `to_json`.
    """
    free = option_names(options, OptionTrait.NO_EFFECT_ON_RESULTS)
    decisive = _without_unset(options, {name: value for name, value in values.items() if name not in free})
    for group, its_options in _groups(options).items():
        remaining = _without_unset(its_options, decisive.get(group, {}))
        decisive |= {group: remaining} if remaining else {}
    return digest(decisive)


def _without_unset(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without the Nones of options that some records do not have: added later, or removed."""
    late = option_names(options, OptionTrait.ADDED_LATER)
    return {
        name: value
        for name, value in values.items()
        if not (is_removed(name, value) or (value is None and name in late))
    }


def digest(values: Mapping[str, Any]) -> str:
    """Return a hash of all values, as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def differences(
    options: type | None, old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, str]:
    """Return a line for each field that affects results and has different values in `old` and `new`, by name.

    Args:
        options: the dataclass whose metadata describe the options; if None, all fields are compared.
        old, new: values of the options, as returned by `to_json`.
        prefix: prefix of the names.
    """
    lines: dict[str, str] = {}
    free: Set[str] = frozenset() if options is None else option_names(options, OptionTrait.NO_EFFECT_ON_RESULTS)
    late = REMOVED if options is None else REMOVED | option_names(options, OptionTrait.ADDED_LATER)
    groups: Mapping[str, type] = {} if options is None else _groups(options)
    for name in sorted({*old, *new} - free):
        before, now = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            lines |= differences(groups.get(name), before, now, f"{prefix}{name}.")
        elif before != now and not (name in late and not before and not now):
            lines[prefix + name] = f"{prefix}{name}: recorded {before!r}, given {now!r}"
    return lines


def to_json(config: Any) -> dict[str, Any]:
    """Return the fields of a config as JSON values; paths become strings, tuples lists."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_json(cls: type, values: Mapping[str, Any], where: str = "") -> Any:
    """Return an instance of `cls` from the values of `to_json`. Raise a LabError for an unknown field."""
    hints = get_type_hints(cls)
    given = {name: value for name, value in values.items() if not is_removed(name, value)}
    unknown = [name for name in given if name not in hints]
    if unknown:
        raise LabError(f"unknown field {where}{unknown[0]}; known: {', '.join(hints)}")
    return cls(**{name: _revive(hints[name], value, f"{where}{name}.") for name, value in given.items()})


def _revive(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, value, where)
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    if isinstance(value, str) and Path in kinds and str not in kinds:
        return Path(value)
    return value
