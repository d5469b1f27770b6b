"""The configuration fields that say what a model shifts, and what transformers derives from them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from kvshift.layers import ShiftOptions


@dataclass(kw_only=True, repr=False)
class ShiftConfig:
    """The fields of the shift: a mixin that is listed before a configuration class of transformers.

    Transformers' own class must not load a saved model: it would load the weights, ignore the coefficients and compute
    without the shift. To prevent this, a configuration is saved with a `use_cache` of a type that transformers' own
    class rejects, with an error message that shows how to load the model.

    Attributes:
        loaded_by: name of the function or class that loads a saved model, for that message.
        shift_targets: which of "q", "k" and "v" each layer shifts; () for a model without shift.
        shift_window: number of tokens that are mixed, the current one included; 2 in the paper.
        shift_constraint: "free", "gate" or "clamp"; see `kvshift.KVShift`.
        shift_init: "uniform" (as in the paper, for training from scratch) or "identity" (the outputs of a pretrained
            model stay the same).
    """

    loaded_by: ClassVar[str]
    shift_targets: list[str] | tuple[str, ...] = ("k", "v")
    shift_window: int = 2
    shift_constraint: str = "free"
    shift_init: str = "uniform"
    use_cache: bool | dict[str, bool] = True

    def __post_init__(self, **kwargs: Any) -> None:
        check_unknown_fields(self, kwargs)
        ShiftOptions.of(self)  # validates them
        self.shift_targets = list(self.shift_targets)
        if isinstance(self.use_cache, dict):
            (self.use_cache,) = self.use_cache.values()
        if not isinstance(self.use_cache, bool):
            raise ValueError(f"use_cache must be True or False, got {self.use_cache!r}")
        layer_types = kwargs.pop("layer_types", None)
        if layer_types is not None:
            self.layer_types = layer_types
        super().__post_init__(**kwargs)  # type: ignore[misc]

    @property
    def layer_types(self) -> list[str]:
        """Type of each layer, for transformers' caches; a "hybrid" layer also keeps the last raw keys and values."""
        sliding = getattr(self, "sliding_window", None) is not None
        if self.shift_targets:
            layer_type = "hybrid_sliding" if sliding else "hybrid"
        else:
            layer_type = "sliding_attention" if sliding else "full_attention"
        return [layer_type] * self.num_hidden_layers  # type: ignore[attr-defined]

    @layer_types.setter
    def layer_types(self, layer_types: list[str]) -> None:
        """Accept only what the other fields imply; PEFT's Shadow assigns that after it has changed their number."""
        if layer_types != self.layer_types:
            raise ValueError(
                f"layer_types must be left out or match the other fields, {self.layer_types}; got {layer_types!r}"
            )

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the fields to save; `use_cache` of a model with shift is changed as the class describes.

        (In `to_dict` it is what `generate` reads.)
        """
        saved = super().to_diff_dict()  # type: ignore[misc]
        if self.shift_targets:
            saved["use_cache"] = {f"kv_shift: load it with {self.loaded_by}": self.use_cache}
        return saved


def check_unknown_fields(config: Any, unknown: dict[str, Any]) -> None:
    """Refuse misspelt fields, which transformers would keep as attributes without effect.

    In a configuration that was saved, such as that of a converted model, they were without effect before, too.

    Args:
        config: the new configuration, all of whose fields are set.
        unknown: the arguments of its constructor that are no fields. Of a saved configuration, "model_type" is one.

    Raises:
        ValueError: a field looks misspelt. With "model_type", this is a warning.
    """
    known = [field.name for field in fields(config)]
    of_shift = [name for name in known if name.startswith("shift_")]
    for name, value in unknown.items():
        close = get_close_matches(name, known, n=1, cutoff=0.85)
        if close or name.startswith("shift_") or f"shift_{name}" in known:
            message = f"unknown configuration field {name!r} (value {value!r}); known: {', '.join(close or of_shift)}"
            if "model_type" not in unknown:
                raise ValueError(message)
            warnings.warn(f"{message}. It has no effect", stacklevel=3)
