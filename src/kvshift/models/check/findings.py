"""Results of a check: differences from a reference, errors that are refusals and errors that are not, verdicts."""

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
    r"is an argument of|\brequires?\b|forwarding implemented",  # the last of `generate` from inputs_embeds
    re.IGNORECASE,
)
_DELIBERATE = (ValueError, NotImplementedError, TypeError, RuntimeError)
_TORCH = str(Path(torch.__file__).parent)


class NotSupportedError(Exception):
    """The model has no such argument, or no such path."""


class WrongShapeError(Exception):
    """The model returned logits of another shape than its tokens have."""


@dataclass(frozen=True)
class Verdict:
    """The result for one property.

    Attributes:
        detail: what is wrong and where it begins, the line of a refusal, or what is missing.
        error: the largest difference from the reference, in the unit of `of`; None where nothing was compared.
        tolerance: what rounding may do, in the same unit.
        of: "logits", "log-probabilities" or "gradients"; these as parts of the largest.
        first: the first position that is wrong: "case", "sequence", "position"; None where none is.
        positions, wrong: how many were compared, and how many of them are wrong.
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
        model: the class.
        dtype: of the check.
        spread: standard deviation of the logits over the vocabulary, the mean over positions.
        tolerance: of a logit, as `noise` of rounding gives it.
        notes: limits of this check, and how it departs from the model that was given.
        versions: of Python and the packages that matter.
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
        """The verdict of a property by its name."""
        return next(verdict for verdict in self.verdicts if verdict.property == name)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it: an error that is not finite is the string "nan" or "inf"."""
        values = asdict(self)
        for verdict in values["verdicts"]:
            if verdict["error"] is not None and not -float("inf") < verdict["error"] < float("inf"):
                verdict["error"] = str(verdict["error"])
        return values


class Comparison:
    """Differences between a model's results and the reference, position by position.

    Attributes:
        case: what is being compared, which a verdict names.
        remark: the detail of a verdict that is right.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance, self.of = tolerance, "logits"
        self.error, self.positions, self.wrong = 0.0, 0, 0
        self.first: dict[str, Any] | None = None
        self.case = self.remark = ""

    def add(self, got: Tensor, expected: Tensor, **where: Any) -> None:
        """Compare (T, V) with (T, V); `where` as in `add_errors`."""
        self.add_errors(differences(got, expected), **where)

    def add_errors(self, error_T: Tensor, *, sequence: int = 0, start: int = 0, within: str = "") -> None:
        """Add the errors of positions from `start` on; one that is not a number counts as infinite.

        Args:
            within: a part of the case.
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
        """The verdict, where `raised` ended the comparison, if anything did."""
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
    """The largest difference (T,) of each position of (T, V); none where both are infinite alike."""
    return torch.where(got == expected, 0.0, (got - expected).abs()).amax(-1)


def is_refusal(error: BaseException) -> bool:
    """Whether an error is meant for the caller: a `raise` outside of torch with a message that says "not supported".

    Errors of torch's operations on shapes that do not fit, missing attributes or keys, and failed assertions are not;
    nor is a message of an internal function that was called where it should not have been.
    """
    if not isinstance(error, _DELIBERATE):
        return False
    last = origin(error)
    if last.filename.startswith(_TORCH) or not (last.line or "").startswith("raise"):
        return False
    return isinstance(error, NotImplementedError) or _REFUSING.search(str(error)) is not None


def origin(error: BaseException) -> traceback.FrameSummary:
    """The innermost call that an error came from."""
    return traceback.extract_tb(error.__traceback__, limit=-1)[0]


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:240]
