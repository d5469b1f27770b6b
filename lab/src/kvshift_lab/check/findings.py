"""Results of a check: differences from a reference, refusals and other errors, verdicts."""

from __future__ import annotations

import re
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

VerdictName = Literal["right", "wrong", "refused", "not supported"]

# Deliberate errors say "is not supported", "cannot carry raw keys", "must be padded on the left".
_REFUSING = re.compile(
    r"not (yet )?(been )?(supported|implemented|compatible|available|possible|allowed)|(n't|not) support|unsupported|"
    r"incompatible|\b(cannot|can't) (use|be used|carry|hold|keep|crop|take)|only supported|must (be|not)|has no path|"
    r"is an argument of|\brequires?\b|forwarding implemented",  # the last: `generate` from inputs_embeds
    re.IGNORECASE,
)
_DELIBERATE = (ValueError, NotImplementedError, TypeError, RuntimeError)
_TORCH = str(Path(torch.__file__).parent)


class NotSupportedError(Exception):
    """The model does not have the argument or the feature that is checked."""


class WrongShapeError(Exception):
    """The model returned logits whose shape does not match that of the tokens."""


@dataclass(frozen=True)
class Verdict:
    """The result for one property.

    Attributes:
        detail: what is wrong and where it begins, the message of a refusal, or what is missing.
        error: largest difference from the reference, in the quantity `of`; None if nothing was compared.
        tolerance: largest difference that counts as rounding, in the same quantity.
        of: the compared quantity: "logits", "log-probabilities", or "gradients" relative to the largest gradient.
        first: "case", "sequence" and "position" of the first wrong position; None if there is none.
        positions, wrong: number of positions that were compared, and that are wrong.
    """

    property: str
    verdict: VerdictName
    detail: str = ""
    error: float | None = None
    tolerance: float | None = None
    of: str = "logits"
    first: dict[str, Any] | None = None
    positions: int = 0
    wrong: int = 0


@dataclass(frozen=True)
class Report:
    """The result of `check_model`.

    Attributes:
        model: name of the model's class.
        dtype: dtype in which the model was checked.
        spread: standard deviation of the logits over the vocabulary, averaged over positions.
        tolerance: largest difference of a logit that counts as rounding; it follows from `noise`.
        notes: limits of this check, and differences between the checked model and the given one.
        versions: versions of Python and of the main packages.
    """

    model: str
    model_type: str
    attn_implementation: str
    dtype: str
    device: str
    length: int
    spread: float
    noise: float
    tolerance: float
    verdicts: list[Verdict]
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.verdict == "wrong"]

    def of(self, name: str) -> Verdict:
        """Return the verdict of the property with this name."""
        return next(verdict for verdict in self.verdicts if verdict.property == name)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, in which an error that is not finite is the string "nan" or "inf"."""
        values = asdict(self)
        for verdict in values["verdicts"]:
            if verdict["error"] is not None and not -float("inf") < verdict["error"] < float("inf"):
                verdict["error"] = str(verdict["error"])
        return values


class Comparison:
    """Differences between a model's results and the reference, position by position.

    Attributes:
        case: what is being compared, as named in the verdict.
        remark: detail of the verdict if it is "right".
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance, self.of = tolerance, "logits"
        self.error, self.positions, self.wrong = 0.0, 0, 0
        self.first: dict[str, Any] | None = None
        self.case = self.remark = ""

    def add(self, got: Tensor, expected: Tensor, **where: Any) -> None:
        """Compare logits (T, V) with the expected ones; `where` as in `add_errors`."""
        self.add_errors(differences(got, expected), **where)

    def add_errors(self, error_T: Tensor, *, sequence: int = 0, start: int = 0, within: str = "") -> None:
        """Add the errors of the positions from `start` on; NaN counts as infinite.

        Args:
            within: the part of the case that these positions belong to.
        """
        error_T = error_T.nan_to_num(float("inf"))
        bad_T = error_T > self.tolerance
        self.positions += len(error_T)
        self.wrong += int(bad_T.sum())
        self.error = max(self.error, float(error_T.max())) if len(error_T) else self.error
        if self.first is None and bool(bad_T.any()):
            case = ", ".join(filter(None, (self.case, within)))
            self.first = {"case": case, "sequence": sequence, "position": start + int(bad_T.nonzero()[0])}

    def verdict(self, name: str, spread: float, raised: BaseException | None = None) -> Verdict:
        """Return the verdict; `raised` is the exception that ended the comparison, if any."""
        kind, detail = "right", self.remark
        if self.first is not None:
            kind, detail = "wrong", self._first_error(spread, **self.first)
        elif isinstance(raised, NotSupportedError):
            kind, detail = "not supported", str(raised)
        elif raised is not None and is_refusal(raised):
            kind, detail = "refused", first_line(raised)
        elif raised is not None:
            how = "" if isinstance(raised, WrongShapeError) else f"raises {type(raised).__name__}: "
            kind, detail = "wrong", f"{self.case + ': ' if self.case else ''}{how}{first_line(raised)}"
        elif not self.positions:
            raise AssertionError(f"{name} compared nothing")
        known: dict[str, Any] = {}
        if self.positions and kind in ("right", "wrong"):
            known = {"error": self.error, "tolerance": self.tolerance, "positions": self.positions, "wrong": self.wrong}
        return Verdict(name, kind, detail, of=self.of, first=self.first, **known)

    def _first_error(self, spread: float, case: str, sequence: int, position: int) -> str:
        if self.of == "gradients":
            return f"{case} sees position {position}: gradients up to {self.error:.2g} of the largest"
        where = [case] * bool(case) + [f"sequence {sequence}"] * bool(sequence) + [f"position {position}"]
        return (
            f"from {', '.join(where)} on, {self.wrong} of {self.positions} positions: {self.of} off by up to "
            f"{self.error:.2g}, beside a spread of {spread:.2g}"
        )


def differences(got: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference at each position, (T,), of two (T, V); equal infinities do not differ."""
    return torch.where(got == expected, 0.0, (got - expected).abs()).amax(-1)


def is_refusal(error: BaseException) -> bool:
    """Return True if an error is meant for the caller: a `raise` outside of torch that says "not supported" or similar.

    Errors of torch operations on shapes that do not match, missing attributes or keys, and failed assertions are not
    refusals; nor are messages of internal functions that were called by mistake.
    """
    if not isinstance(error, _DELIBERATE):
        return False
    last = origin(error)
    if last.filename.startswith(_TORCH) or not (last.line or "").startswith("raise"):
        return False
    return isinstance(error, NotImplementedError) or _REFUSING.search(str(error)) is not None


def origin(error: BaseException) -> traceback.FrameSummary:
    """Return the innermost frame of an error's traceback."""
    return traceback.extract_tb(error.__traceback__, limit=-1)[0]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, up to 240 characters, or the name of its type if it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:240]
