"""Write the sentences of an igsm.py problem and its solution from the definitions of its quantities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvshift_lab.tasks.igsm.quantities import Abstract, Instance
from kvshift_lab.tasks.igsm.random_choices import Uniform
from kvshift_lab.tasks.igsm.wording import LETTERS


def statement(name: str, instance: Instance) -> str:
    """Return the sentence that defines a quantity."""
    each = [f"each {dependency}" for dependency in instance.dependencies]
    if not each:
        return f"The number of each {name} equals {instance.number} ."
    base = each[0]
    if len(each) > 1:
        kind = "difference" if instance.minus else "sum"
        base = f"the {kind} of {' , '.join(each[:-1])} and {each[-1]}"
    if instance.number is not None:
        base = f"{instance.number} {'times as much as' if instance.times else 'more than'} {base}"
    return f"The number of each {name} equals {base} ."


@dataclass(slots=True)
class Writing:
    """A solution under construction. Letters are drawn when they are needed, each at most once.

    The sketch is the solution without names and numbers: which steps are combined by which sign.
    """

    values: Mapping[str, int]
    uniform: Uniform
    modulus: int
    sentences: list[str] = field(default_factory=list)
    computed: list[bool] = field(default_factory=list)
    sketch: list[str] = field(default_factory=list)
    _letters: list[str] = field(default_factory=lambda: list(LETTERS))
    _letter_of: dict[str, str] = field(default_factory=dict)
    _value_of: dict[str, int] = field(default_factory=dict)  # by letter or written number
    _mark_of: dict[str, str] = field(default_factory=dict)

    def define(self, name: str, definition: Instance | Abstract) -> None:
        """Append the sentence that defines a quantity; its dependencies must have been defined."""
        letter = self._new_letter()
        equations: list[str] = []
        count = self._count(definition)
        self.computed.append(count > 0)

        def combine(one: str, sign: str, other: str) -> str:
            nonlocal count
            count -= 1
            target = self._new_letter() if count else letter
            a, b = self._value_of[one], self._value_of[other]
            value = (a * b if sign == "*" else a - b if sign == "-" else a + b) % self.modulus
            self._note(target, value, f"{self._mark_of[one]}{sign}{self._mark_of[other]}")
            numbers = f"= {a} {sign} {b} " if one.isalpha() or other.isalpha() else ""
            equations.append(f"{'' if count else 'so '}{target} = {one} {sign} {other} {numbers}= {value}")
            return target

        if isinstance(definition, Instance):
            operands = [self._letter_of[dependency] for dependency in definition.dependencies]
            sign = "-" if definition.minus else "+"
        else:
            operands, sign = [], "+"
            for term in definition.terms:
                first, *rest = (self._letter_of[part] for part in term)
                for other in rest:
                    first = combine(first, "*", other)
                operands.append(first)
        base = operands[0] if operands else ""
        for other in operands[1:]:
            base = combine(base, sign, other)
        if isinstance(definition, Instance) and definition.number is not None:
            number = str(definition.number)
            self._value_of[number], self._mark_of[number] = definition.number, "n"
            base = combine(number, "*" if definition.times else "+", base) if base else number
        if not equations:
            value = self._value_of[base]
            self._note(letter, value, self._mark_of[base])
            equations.append(f"so {letter} = {base} = {value}" if base.isalpha() else f"so {letter} = {value}")
        self._letter_of[name] = letter
        self.sentences.append(f"Define {name} as {letter} ; {' ; '.join(equations)} .")

    def _count(self, definition: Instance | Abstract) -> int:
        """Return the number of operation signs in the sentence of a definition."""
        if isinstance(definition, Abstract):
            return len(definition.dependencies) - 1
        return len(definition.dependencies) + (definition.number is not None) - 1

    def _new_letter(self) -> str:
        at = int(self.uniform() * len(self._letters))
        return self._letters.pop(at)

    def _note(self, letter: str, value: int, mark: str) -> None:
        self.sketch.append(mark)
        self._value_of[letter] = value
        self._mark_of[letter] = str(len(self.sketch))
