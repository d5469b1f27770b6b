"""The arms that a study compares; each is run with every seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA, VARIANTS

_VARIANTS = {name: entry.label for name, entry in VARIANTS.items()}
_VARIANTS["differential-no-qk-norm"] = "differential without QK-norm"  # only in the paper's Table 11


def layers_text(count: int) -> str:
    """Return a number of layers in words: "1 layer", "2 layers"."""
    return f"{count} layer{'s' if count > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm of a study, given by the values that distinguish it from the other arms. Runs have all other options.

    Attributes:
        variant: name of a variant.
        layers: number of layers of the model.
        length: number of tokens in a sequence.
        width: width of the model.
        case: a distinction without a number, such as the name of a size, a task or a part of a model.
        steps: number of training steps.
        rate: learning rate.
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
        """The name of the arm in figures and tables: "KV-shift, 1 layer"."""
        return ", ".join(_WORDS[name](value) for name, value in self.to_json().items())

    def __str__(self) -> str:
        return self.label

    def to_json(self) -> dict[str, Any]:
        """Return the values that distinguish the arm, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def pair(**what: Any) -> tuple[Arm, Arm]:
    """Return the arms of KV shift and of its baseline, which share all other values."""
    shifted, vanilla = (Arm(variant=variant, **what) for variant in SHIFTED_AND_VANILLA)
    return shifted, vanilla


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


def arm_from_label(label: str) -> Arm:
    """Return the arm with a label: records written before `Arm` existed contain only labels."""
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
