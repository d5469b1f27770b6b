"""A generated problem with its solution, and the steps of a parsed solution."""

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
        name: name of the defined quantity, in spaced words.
        letter: letter that denotes the quantity in later sentences.
        equations: parts between the semicolons, without "so"; each is a tuple of sides, and each side a tuple of words.
    """

    name: str
    letter: str
    equations: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def result(self) -> str:
        """The words after the last "=", which should be the value."""
        return " ".join(self.equations[-1][-1])


@dataclass(frozen=True, slots=True)
class Known:
    """Definitions of a solution so far: values by name, and names by letter (None for auxiliary letters)."""

    values: dict[str, int]
    letters: dict[str, str | None]


class Definition(Protocol):
    """The definition of a quantity by others."""

    @property
    def dependencies(self) -> tuple[str, ...]:
        """Names of the quantities on which this one depends."""
        ...

    def value(self, values: Mapping[str, int]) -> int:
        """Return the value of the quantity, 0 ... modulus - 1, from the values of the dependencies."""
        ...

    def is_correct_step(self, step: Step, known: Known) -> bool:
        """Return True if the equations of a step correctly compute this quantity from the known ones."""
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in spaced words (see wording.py).

    Attributes:
        statements: sentences of the problem, in order.
        question: question of the problem.
        solution: sentences of the solution; in each, the value is the last word before the full stop.
        computed: for each sentence of the solution, whether its value is the result of a computation, not a copy.
        asked: name of the quantity that the question asks for.
        values: value of every quantity of the problem, by name.
        definitions: definition of every quantity of the problem, by name.
        key: key of the split; problems with the same key are all for training or all for questions.
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
        """Value of the quantity that the question asks for."""
        return self.values[self.asked]


def bucket_of(key: str) -> int:
    """Return hash(key) mod 23, identical on all platforms: 0 ... 15 are for training, 16 ... 22 for questions."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HASH_BUCKETS
