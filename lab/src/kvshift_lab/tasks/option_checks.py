"""Checks of options that several tasks share."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from kvshift_lab.core.errors import LabError, require


def check_choices(task: str, config: Any) -> None:
    """Raise a LabError if a field declared as a Literal has another value."""
    types = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        if typing.get_origin(types[field.name]) is not typing.Literal:
            continue
        choices, value = typing.get_args(types[field.name]), getattr(config, field.name)
        if value not in choices:
            raise LabError(f"{task}.{field.name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def check_at_least(task: str, config: Any, **smallest: int) -> None:
    """Raise a LabError if a field is below its smallest value."""
    for name, least in smallest.items():
        value = getattr(config, name)
        require(value >= least, f"{task}.{name}", value, f"{least} or more")


def check_batch_size(batch_size: int) -> None:
    """Raise a ValueError if the batch size is below 1."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
