"""What a check finds: differences of logits, errors that refuse and errors that do not, and the verdicts they give."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = [
    "Comparison",
    "NotSupportedError",
    "Report",
    "Verdict",
    "VerdictName",
    "WrongShapeError",
    "is_refusal",
    "raised_at",
    "said",
]

VerdictName = Literal["right", "wrong", "refused", "not supported"]

# How an error says that it is meant: "is not supported", "cannot carry raw keys", "must be padded on the left".
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
    """What was found of one property.

    Attributes:
        detail: what is wrong and where it begins, the line of a refusal, or what is missing.
        error: the largest difference from the slow truth, in the unit of `of`; None where nothing was compared.
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
    """What `check_model` found.

    Attributes:
        model: the class.
        dtype: what it was checked in.
        spread: standard deviation of the logits over the vocabulary, the mean over positions.
        tolerance: of a logit, as `noise` of rounding gives it.
        notes: what the check did not reach, or did otherwise than the model was given.
        versions: of Python and the packages that decide.
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
    """Differences between what a model gave and the slow truth, position by position.

    Attributes:
        case: what is being compared, for the message of an error that ends it.
    """

    def __init__(self, tolerance: float, of: str = "logits") -> None:
        self.tolerance, self.of = tolerance, of
        self.error, self.positions, self.wrong = 0.0, 0, 0
        self.first: dict[str, Any] | None = None
        self.case = ""
        self.remark = ""

    def add(self, got: Tensor, expected: Tensor, *, sequence: int = 0, start: int = 0) -> None:
        """Compare (T, V) with (T, V); the first of them stands at position `start` of its sequence."""
        difference = torch.where(got == expected, 0.0, (got - expected).abs())  # equal where both are infinite
        self.errors(difference.amax(-1), sequence=sequence, start=start)

    def errors(self, error_T: Tensor, *, sequence: int = 0, start: int = 0) -> None:
        """Take the errors of the positions from `start` on; one that is not a number counts as infinite."""
        error_T = error_T.nan_to_num(float("inf"))
        bad_T = error_T > self.tolerance
        self.positions += len(error_T)
        self.wrong += int(bad_T.sum())
        self.error = max(self.error, float(error_T.max())) if len(error_T) else self.error
        if self.first is None and bool(bad_T.any()):
            position = start + int(bad_T.nonzero()[0])
            self.first = {"case": self.case, "sequence": sequence, "position": position}

    def verdict(self, name: str, spread: float, raised: BaseException | None = None) -> Verdict:
        """The verdict, where `raised` ended the comparison, if anything did."""
        kind, detail = "right", self.remark
        if self.first is not None:
            kind, detail = "wrong", self._begins(spread)
        elif isinstance(raised, NotSupportedError):
            kind, detail = "not supported", str(raised)
        elif raised is not None and is_refusal(raised):
            kind, detail = "refused", said(raised)
        elif raised is not None:
            how = "" if isinstance(raised, WrongShapeError) else f"raises {type(raised).__name__}: "
            kind, detail = "wrong", f"{self.case + ': ' if self.case else ''}{how}{said(raised)}"
        elif not self.positions:
            raise AssertionError(f"{name} compared nothing")
        known: dict[str, Any] = {}
        if self.positions and kind in ("right", "wrong"):
            known = {"error": self.error, "tolerance": self.tolerance, "positions": self.positions, "wrong": self.wrong}
        return Verdict(name, kind, detail, of=self.of, first=self.first, **known)

    def _begins(self, spread: float) -> str:
        assert self.first is not None
        case, sequence, position = self.first["case"], self.first["sequence"], self.first["position"]
        if self.of == "gradients":
            return f"{case} sees position {position}: gradients up to {self.error:.2g} of the largest"
        where = [case] * bool(case) + [f"sequence {sequence}"] * bool(sequence) + [f"position {position}"]
        return (
            f"from {', '.join(where)} on, {self.wrong} of {self.positions} positions: {self.of} off by up to "
            f"{self.error:.2g}, beside a spread of {spread:.2g}"
        )


def is_refusal(error: BaseException) -> bool:
    """Whether an error was meant for the caller: a `raise` outside of torch, whose message says what is not supported.

    What an operation of torch raises on shapes that do not fit, a missing attribute or key, and a failed assertion were
    not; nor is a message of something internal that was called where it should not have been.
    """
    if not isinstance(error, _DELIBERATE):
        return False
    file, line = raised_at(error)
    if file.startswith(_TORCH) or not linecache.getline(file, line).strip().startswith("raise"):
        return False
    return isinstance(error, NotImplementedError) or _REFUSING.search(str(error)) is not None


def raised_at(error: BaseException) -> tuple[str, int]:
    """File and line of the innermost call that an error came from."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return ("", 0) if last is None else (last.tb_frame.f_code.co_filename, last.tb_lineno)


def said(error: BaseException) -> str:
    """The first line of what an error says."""
    lines: Sequence[str] = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:240]
