"""What a study compares, as data: its arms, each of which is run with every seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvshift.lab.variants.by_name import PAIR, VARIANTS

_VARIANTS = {name: entry.label for name, entry in VARIANTS.items()}
_VARIANTS["differential-no-qk-norm"] = "differential without QK-norm"  # which only the paper's Table 11 has


def layers_text(count: int) -> str:
    """In words."""
    return f"{count} layer{'s' if count > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm of a study, by what sets it apart from the others; all else is in the options of its runs.

    Attributes:
        variant: the name of a variant.
        layers: of the model.
        length: tokens in a sequence.
        width: of the model.
        case: what no number says: the name of a size, a task, a part of a model.
        steps: of training.
        rate: the learning rate.
    """

    variant: str | None = None
    layers: int | None = None
    length: int | None = None
    width: int | None = None
    case: str | None = None
    steps: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        """What figures and tables call it: "KV-shift, 1 layer"."""
        return ", ".join(_WORDS[name](value) for name, value in self.to_json().items())

    def __str__(self) -> str:
        return self.label

    def to_json(self) -> dict[str, Any]:
        """What sets it apart, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def pair(**what: Any) -> tuple[Arm, Arm]:
    """KV shift, and what it is compared with, alike in all else."""
    ours, theirs = (Arm(variant=variant, **what) for variant in PAIR)
    return ours, theirs


_WORDS: Mapping[str, Callable[[Any], str]] = {
    "variant": _VARIANTS.__getitem__,
    "layers": layers_text,
    "length": "{} tokens".format,
    "width": "width {}".format,
    "case": str,
    "steps": "{} steps".format,
    "rate": "rate {:.2g}".format,
}
_NUMBERS = {
    "layers": r"(\d+) layers?",
    "length": r"(\d+) tokens",
    "width": r"width (\d+)",
    "steps": r"(\d+) steps",
    "rate": r"rate (\S+)",
}


def arm_of_label(label: str) -> Arm:
    """The arm that a label stands for: records from before there were arms have nothing else."""
    variants = [name for name, words in _VARIANTS.items() if f"{label}, ".startswith(f"{words}, ")]
    if not variants:
        return Arm(case=label)
    variant = max(variants, key=lambda name: len(_VARIANTS[name]))  # "KV-shift, gate", not "KV-shift"
    found: dict[str, Any] = {}
    cases = []
    for part in label.removeprefix(_VARIANTS[variant]).split(", ")[1:]:
        for name, pattern in _NUMBERS.items():
            if number := re.fullmatch(pattern, part):
                found[name] = float(number[1]) if name == "rate" else int(number[1])
                break
        else:
            cases.append(part)
    return Arm(variant=variant, case=", ".join(cases) or None, **found)
