"""Definitions of the quantities of a problem (see igsm.py), and a check whether a step computes one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from kvshift_lab.tasks.igsm.problem import Known, Step
from kvshift_lab.tasks.igsm.wording import MODULUS

Polynomial = Counter[tuple[str, ...]]
"""The coefficient of each monomial, a sorted tuple of names: 2 x y + 5 is {("x", "y"): 2, (): 5}."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A quantity that is defined by a statement: a base of the dependencies d_1 ... d_n, a number r, or both

    base      d_1,  d_1 + ... + d_n,  or (minus, n = 2) d_1 - d_2
    quantity  base,  r + base,  or (times) r base;  r alone where there are no dependencies

    all modulo `modulus`.
    """

    dependencies: tuple[str, ...]
    minus: bool = False
    number: int | None = None
    times: bool = False
    modulus: int = MODULUS

    @property
    def operations(self) -> int:
        """Number of operations: max(1, in-degree - 1), where the number r counts as a dependency."""
        return max(1, len(self.dependencies) + (self.number is not None) - 1)

    def value(self, values: Mapping[str, int]) -> int:
        """See `Definition.value`."""
        first, *rest = [values[name] for name in self.dependencies] or [0]
        base = first - sum(rest) if self.minus else first + sum(rest)
        if self.number is None:
            return base % self.modulus
        return (self.number * base if self.times else self.number + base) % self.modulus

    def is_correct_step(self, step: Step, known: Known) -> bool:
        """See `_equations_match`."""
        base = Polynomial()
        for at, name in enumerate(self.dependencies):
            base = _combine(base, "-" if self.minus and at else "+", Counter([(name,)]))
        if self.number is not None:
            base = _combine(Counter({(): self.number}), "*" if self.times else "+", base)
        return _equations_match(step, known, base, self.modulus)


@dataclass(frozen=True, slots=True)
class Abstract:
    """The count of a category in an item, modulo `modulus`: a sum of products over the items of the next layer in it.

    Each term is the count of such an item, multiplied by the count of the category in it unless it is of that category.
    """

    terms: tuple[tuple[str, ...], ...]
    modulus: int = MODULUS

    @property
    def dependencies(self) -> tuple[str, ...]:
        """Names of all quantities in the terms."""
        return tuple(name for term in self.terms for name in term)

    @property
    def operations(self) -> int:
        """Number of operations: max(1, in-degree - 1)."""
        return max(1, len(self.dependencies) - 1)

    def value(self, values: Mapping[str, int]) -> int:
        """See `Definition.value`."""
        return sum(math.prod(values[name] for name in term) for term in self.terms) % self.modulus

    def is_correct_step(self, step: Step, known: Known) -> bool:
        """See `_equations_match`."""
        return _equations_match(step, known, Counter(tuple(sorted(term)) for term in self.terms), self.modulus)


def _combine(one: Polynomial, sign: str, other: Polynomial) -> Polynomial:
    """Return the sum, difference or product of two polynomials, for the sign +, - or *."""
    if sign == "*":
        found = Polynomial()
        for (left, a), (right, b) in product(one.items(), other.items()):
            found[tuple(sorted(left + right))] += a * b
        return found
    found = one.copy()
    (found.update if sign == "+" else found.subtract)(other)
    return found


def _equations_match(step: Step, known: Known, wanted: Polynomial, modulus: int) -> bool:
    """Return True if a step computes `wanted`, in any order and with any auxiliary letters.

    Each equation must have the form `X = expression [= the same in numbers] = value`. An expression is one letter or
    number, or two with a sign between them. The part in numbers is required for two operands of which at least one is a
    letter, and not allowed otherwise. A number that is itself the value is not repeated.
    """
    found: dict[str, tuple[Polynomial, int]] = {}

    def operand(word: str) -> tuple[Polynomial, int] | None:
        if word.isdigit() and word == str(int(word) % modulus):
            return Counter({(): int(word)}), int(word)
        name = known.letters.get(word)
        return (Counter([(name,)]), known.values[name]) if name is not None else found.get(word)

    for target, *sides in step.equations:
        if len(target) != 1 or not sides or len(sides[0]) not in (1, 3):
            return False
        one = operand(sides[0][0])
        if one is None:
            return False
        chain: list[tuple[str, ...]] = [sides[0]]
        polynomial, value = one
        if len(sides[0]) == 3:
            _, sign, second = sides[0]
            other = operand(second)
            if other is None or sign not in ("+", "-", "*"):
                return False
            if sides[0][0].isalpha() or second.isalpha():
                chain.append((str(value), sign, str(other[1])))
            polynomial = _combine(polynomial, sign, other[0])
            value = {"+": value + other[1], "-": value - other[1], "*": value * other[1]}[sign] % modulus
        if (str(value),) != chain[-1]:
            chain.append((str(value),))
        if sides != chain:
            return False
        found[target[0]] = polynomial, value
    if step.equations[-1][0] != (step.letter,):
        return False
    difference = _combine(found[step.letter][0], "-", wanted)
    return not any(number % modulus for number in difference.values())
