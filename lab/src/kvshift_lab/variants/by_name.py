"""All variants by the name that a user types, with their labels, colors and the options that a name implies.

The module of a variant is imported only when one of its models is built or loaded, so this module imports quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from kvshift_lab.core.errors import LabError, nearest

if TYPE_CHECKING:
    from kvshift_lab.variants.variant import ModelVariant

# The model options of a run: `ModelConfig`, `GPT2Options` or `EncoderOptions`.
_Options = TypeVar("_Options")


@dataclass(frozen=True)
class VariantEntry:
    """The name of a variant, its label and color in figures, and where it is defined.

    Attributes:
        name: name that a user types.
        label: name in tables and figures.
        color: color in all figures. The colors of the first entries are distinguishable for colour-blind readers.
        module: module of `kvshift_lab.variants` whose `MODEL_VARIANTS` contains the variant.
        shifts: whether the variant is KV shift, which the options `shift_*` configure.
        fixes: values of the options `shift_*` that the name implies.
    """

    name: str
    label: str
    color: str
    module: str
    shifts: bool = False
    fixes: Mapping[str, Any] = field(default_factory=dict, hash=False)


# What an option of the shift that is None stands for, and what a run without shift records for it.
_DEFAULTS = {"shift_window": 2, "shift_constraint": "free", "shift_init": "uniform"}


def _shift(
    name: str, label: str, color: str, *, targets: str = "", window: int = 0, constraint: str = ""
) -> VariantEntry:
    fixes = _shift_fields({"shift_targets": targets, "shift_window": window, "shift_constraint": constraint})
    return VariantEntry(name, label, color, "variant", shifts=True, fixes=fixes)


def _shift_fields(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all fields that `VariantEntry.fixes` may contain, given the recorded options of a model."""
    targets = tuple(sorted(model.get("shift_targets") or "kv", key="qkv".index))
    others = {name: model.get(name) or _DEFAULTS[name] for name in ("shift_window", "shift_constraint")}
    return {"shift_targets": targets, **others}


VARIANTS: Mapping[str, VariantEntry] = {
    entry.name: entry
    for entry in (
        VariantEntry("vanilla", "vanilla", "#0072b2", "variant"),
        VariantEntry("kv-shift", "KV-shift", "#d55e00", "variant", shifts=True),
        _shift("k-shift", "K-shift", "#009e73", targets="k"),
        _shift("v-shift", "V-shift", "#cc79a7", targets="v"),
        _shift("qkv-shift", "QKV-shift", "#e69f00", targets="qkv"),
        _shift("kv-shift-window-3", "KV-shift, window 3", "#117788", window=3),
        _shift("kv-shift-window-4", "KV-shift, window 4", "#222222", window=4),
        _shift("kv-shift-gate", "KV-shift, gate", "#ddaa33", constraint="gate"),
        _shift("kv-shift-clamp", "KV-shift, clamp", "#6a3d9a", constraint="clamp"),
        VariantEntry("kv-shift-induction-start", "induction-start KV-shift", "#999933", "induction_start"),
        VariantEntry("smear", "smear", "#56b4e9", "smear"),
        VariantEntry("key-offset", "key offset", "#882255", "key_offset"),
        VariantEntry("key-offset-whole", "key offset, whole", "#bb5566", "key_offset"),
        VariantEntry("canon", "Canon", "#225522", "convolution"),
        VariantEntry("inkling", "Inkling", "#44aa99", "convolution"),
        VariantEntry("conv-2", "convolution of width 2", "#88ccee", "convolution"),
        VariantEntry("fox-shift", "FoX shift", "#aaaa00", "fox_shift"),
        VariantEntry("differential", "differential", "#661100", "differential"),
        VariantEntry("differential-wide", "differential, wide", "#999999", "differential"),
        VariantEntry("differential-kv-shift", "differential + KV-shift", "#aa4499", "differential"),
        VariantEntry("selective", "selective", "#117733", "selective"),
        VariantEntry("selective-key", "selective, along keys", "#a6761d", "selective"),
        VariantEntry("mla", "MLA", "#cc6677", "mla"),
        VariantEntry("mla-kv-shift", "MLA + KV-shift", "#994455", "mla"),
    )
}

SHIFTED_AND_VANILLA = ("kv-shift", "vanilla")
"""The names of KV shift and of its baseline."""


def find_entry(name: str, where: str = "variant") -> VariantEntry:
    """Return the entry called `name`; a LabError for an unknown name calls the option `where`."""
    if name not in VARIANTS:
        raise LabError(f"{where}: there is no variant {name!r}; {nearest(name, VARIANTS)}")
    return VARIANTS[name]


def find_variant(name: str, where: str = "variant") -> ModelVariant:
    """Import the module of a variant and return the variant; all names that stand for KV shift return "kv-shift"."""
    entry = find_entry(name, where)
    variants = import_module(f"kvshift_lab.variants.{entry.module}").MODEL_VARIANTS
    return next(variant for variant in variants if variant.name == ("kv-shift" if entry.shifts else name))


def with_variant(options: _Options, name: str) -> _Options:
    """Return the options with the named variant; without shift, the options of the shift have their defaults.

    KV shift and vanilla are expressed by the options `shift_*` alone, even when a name implies these options. A run
    therefore has the same options whether its variant was given by name or by `shift_*`.

    Args:
        options: a `ModelConfig`, `GPT2Options` or `EncoderOptions`.
        name: name of the variant.
    """
    given: Any = options
    entry = find_entry(name)
    if entry.shifts:
        return replace(given, variant=None, **{"shift_targets": given.shift_targets or ("k", "v"), **entry.fixes})
    kept = None if name == "vanilla" else name
    return replace(given, variant=kept, **dict(refinements(given)) | {"shift_targets": ()})


def resolve_variant(options: _Options) -> _Options:
    """Check the options and return them with the values that `variant` implies; unchanged if it is None.

    Raises:
        LabError: the variant does not exist, or an option of the shift contradicts it.
    """
    given: Any = options
    if given.variant is None:
        for name, default in refinements(given):
            if given.shift_targets == () and getattr(given, name) not in (default, (), _DEFAULTS.get(name)):
                raise LabError(
                    f"model.{name} is {getattr(given, name)!r}, but model.shift_targets is empty: nothing shifts"
                )
        return options
    entry = find_entry(given.variant, "model.variant")
    if entry.shifts and given.shift_targets == ():
        raise LabError(
            f"model.shift_targets must name at least one of q, k, v with model.variant {given.variant}, got none; "
            "for a model without shift, choose the variant vanilla"
        )
    made: Any = with_variant(options, given.variant)
    for name, default in refinements(given):
        value, fixed = getattr(given, name), getattr(made, name)
        if value not in (default, fixed, _DEFAULTS.get(name)):
            why = f"for which it is {fixed!r}" if entry.shifts else "which shifts nothing"
            raise LabError(f"model.{name} is {value!r}, but model.variant is {given.variant}, {why}")
    return made


def variant_of(model: Mapping[str, Any]) -> str:
    """Return the name of a run's variant, given the recorded options of its model.

    The name is "kv-shift" for every combination of the options `shift_*` that has no more specific name.
    """
    if model.get("variant") is not None:
        return model["variant"]
    if model.get("shift_targets") == []:
        return "vanilla"
    shift = _shift_fields(model)
    return next((name for name, entry in VARIANTS.items() if entry.fixes == shift), "kv-shift")


def label_of(model: Mapping[str, Any]) -> str:
    """Return the label of a run's variant, such as "vanilla" or "K-shift", given the recorded options of its model."""
    name = variant_of(model)
    if name != "kv-shift":
        return find_entry(name).label
    targets, window, constraint = _shift_fields(model).values()
    refined = [f"window {window}"] if window != _DEFAULTS["shift_window"] else []
    refined += [constraint] if constraint != _DEFAULTS["shift_constraint"] else []
    return ", ".join([shift_label(targets), *refined])


def shift_label(targets: Sequence[str]) -> str:
    """Return the label of a model that shifts the given targets, a subset of "q", "k" and "v"."""
    return f"{''.join(targets).upper()}-shift" if targets else VARIANTS["vanilla"].label


def refinements(options: Any) -> list[tuple[str, Any]]:
    """Return the names and defaults of the fields that configure the shift."""
    return [(item.name, item.default) for item in fields(options) if item.name.startswith(("shift_", "freeze_shift"))]
