"""A problem with its solution, as a generator makes it, and the steps that a solution is read as."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

HASH_BUCKETS = 23
TRAINING_BUCKETS = 16  # buckets 0 ... 15 are for training, 16 ... 22 for questions (Ye et al.)


@dataclass(frozen=True, slots=True)
class Step:
    """A sentence of a solution: "Define NAME as LETTER ; X = E = F = 3 ; so LETTER = G = 5 ."

    Attributes:
        name: what is defined, in spaced words.
        letter: that stands for it from here on.
        equations: what stands between the semicolons, without "so": words between the signs =.
    """

    name: str
    letter: str
    equations: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def result(self) -> str:
        """The words after the last sign =, which are to be the value."""
        return " ".join(self.equations[-1][-1])


@dataclass(frozen=True, slots=True)
class Known:
    """What a solution has defined so far: names to values, and letters to names (or to None, for auxiliary ones)."""

    values: dict[str, int]
    letters: dict[str, str | None]


class Definition(Protocol):
    """How a quantity follows from others."""

    @property
    def dependencies(self) -> tuple[str, ...]:
        """Names of the quantities that must be known."""
        ...

    def value(self, values: Mapping[str, int]) -> int:
        """From the values of the dependencies; 0 ... modulus - 1."""
        ...

    def agrees(self, step: Step, known: Known) -> bool:
        """Whether the equations of a step compute this, from what is known, without an error."""
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in spaced words (see text.py).

    Attributes:
        statements: sentences, in the order in which they stand.
        question: the last sentence of the problem.
        solution: sentences; the value is the last word before the full stop.
        computed: for each of these, whether the value is the result of a computation, and not copied.
        asked: name of the quantity that the question asks for.
        values: of every quantity that the problem fixes, by name.
        definitions: of the same.
        key: problems with one key never part: all may be in training, or all may be asked.
    """

    statements: tuple[str, ...]
    question: str
    solution: tuple[str, ...]
    computed: tuple[bool, ...]
    asked: str
    values: Mapping[str, int]
    definitions: Mapping[str, Definition]
    key: str

    @property
    def answer(self) -> int:
        """Value of what is asked."""
        return self.values[self.asked]


def bucket_of(key: str) -> int:
    """hash(key) mod 23, the same everywhere: 0 ... 15 may occur in training, 16 ... 22 may be asked."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HASH_BUCKETS
