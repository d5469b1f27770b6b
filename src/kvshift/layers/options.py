"""The options of a shift, declared and checked here for layers, models, retrofits and the lab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

Target = Literal["q", "k", "v"]
Constraint = Literal["free", "gate", "clamp"]
Init = Literal["uniform", "identity"]

_ORDER: tuple[Target, ...] = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True)
class ShiftOptions:
    """The options of `kvshift.KVShift`.

    Attributes:
        targets: which of "q", "k" and "v" to shift, stored in this order. ("k", "v") is the method of the paper, ("k",)
            and ("v",) are its ablations, and () is vanilla attention.
        window: number of tokens that are mixed, W, including the current one; at least 2. (The "KV shifting 1, 2, 3" of
            the paper are W = 2, 3, 4.)
        constraint: "free": the parameters are the coefficients. "gate": a1 = sigmoid(parameter) and a2 = 1 - a1, for
            window 2 only. "clamp": the parameters are clamped to [0, 1]; see `kvshift.clamp_after_step`.
        init: "uniform" (as in the paper): all but the last coefficient ~ U(0, 1), and the last is 1 minus their sum.
            "identity": (1, 0, ...), so that the layer changes nothing at first.

    Raises:
        ValueError: an option has an invalid value. The message states the option, the value and the allowed values.

    Source:
        Xu, Wang, Chen (ICML 2025): equation 5; QKV-shift: appendix G; gate and clamp ("0 to 1"): appendix F.1; windows:
        footnote 10.
    """

    targets: Sequence[Target] = ("k", "v")
    window: int = 2
    constraint: Constraint = "free"
    init: Init = "uniform"

    def __post_init__(self) -> None:
        _check(self.targets, self.window, self.constraint, self.init)
        object.__setattr__(self, "targets", tuple(target for target in _ORDER if target in self.targets))

    @classmethod
    def of(cls, source: Any, *, name: str = "shift_") -> ShiftOptions:
        """Read a configuration's `shift_targets`, `shift_window`, `shift_constraint` and `shift_init`.

        Args:
            source: the configuration.
            name: prefix of the options in error messages.
        """
        values = {field.name: getattr(source, f"shift_{field.name}") for field in fields(cls)}
        _check(**values, name=name)  # errors use the names of the configuration
        return cls(**values)

    def as_fields(self) -> dict[str, Any]:
        """Return the options as fields of a configuration, the inverse of `of`, with a list for JSON."""
        return {
            "shift_targets": list(self.targets),
            "shift_window": self.window,
            "shift_constraint": self.constraint,
            "shift_init": self.init,
        }


def _check(targets: Any, window: Any, constraint: Any, init: Any, name: str = "") -> None:
    if not isinstance(targets, Sequence) or isinstance(targets, str) or any(t not in _ORDER for t in targets):
        raise ValueError(f'{name}targets must be a sequence of "q", "k", "v" (empty: none), got {targets!r}')
    if len(set(targets)) != len(targets):
        raise ValueError(f"{name}targets must not name a target twice, got {targets!r}")
    if isinstance(window, bool) or not isinstance(window, int) or window < 2:
        raise ValueError(f"{name}window must be an integer of at least 2, got {window!r}")
    if constraint not in ("free", "gate", "clamp"):
        raise ValueError(f'{name}constraint must be "free", "gate" or "clamp", got {constraint!r}')
    if init not in ("uniform", "identity"):
        raise ValueError(f'{name}init must be "uniform" or "identity", got {init!r}')
    if constraint == "gate" and window != 2:
        raise ValueError(f'{name}window must be 2 with {name}constraint="gate", got {window}')
    if constraint == "gate" and init == "identity":
        raise ValueError(f'{name}init must be "uniform" with {name}constraint="gate": a sigmoid is never exactly 1')
