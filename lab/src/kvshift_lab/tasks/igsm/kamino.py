"""Problems after kaminocode/iGSM, the code on which the paper's data are based.

Every item drawn is a quantity, "item in each category". Each in turn becomes a constant, or a sum, difference or
product of up to three of the remaining quantities, so that a later quantity never depends on an earlier one.

    The number of Gel Pen in each Stationery is the difference between the number of Trail Pack in each Backpack and the
    sum of Map Hall in each Classroom. [...] How many Gel Pen does Stationery have?

    Define Map Hall in each Classroom as a; so a = 4.
    Define Trail Pack in each Backpack as b; so b = 3 * 4 = 12.
    Define Gel Pen in each Stationery as c; so c = 12 - (4) = 8.

The solution defines every quantity, needed or not, after its dependencies; values are modulo 23 or a smaller number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvshift_lab.tasks.igsm.names import SYSTEMS, Category
from kvshift_lab.tasks.igsm.problem import Known, Problem, Step
from kvshift_lab.tasks.igsm.random_choices import Uniform, sample_distinct
from kvshift_lab.tasks.igsm.wording import LETTERS, MODULUS

Letters = Literal["in_order", "random"]
MAX_OPS: dict[Letters, int] = {"in_order": 26, "random": 40}
"""Maximum number of quantities: 26 letters a ... z in kaminocode/iGSM, or 40 items, ten in each of four categories."""
_MOST_DEPENDENCIES = 3
_CATEGORIES = SYSTEMS[0]

Operation = Literal["constant", "+", "-", "*"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The definition of a quantity by dependencies d_1 ... d_n and a number c, which exists only for n < 2:

    constant    c
    +           d_1 + ... + d_n + c
    *           d_1 ... d_n c
    -           d_1 - (d_2 + ... + d_n + c)

    all modulo `modulus`.
    """

    operation: Operation
    dependencies: tuple[str, ...]
    number: int | None
    modulus: int = MODULUS

    def operands(self, values: Mapping[str, int]) -> list[int]:
        """Return the values of the dependencies, followed by the number if there is one."""
        operands = [values[name] for name in self.dependencies]
        return operands if self.number is None else [*operands, self.number]

    def value(self, values: Mapping[str, int]) -> int:
        """See `Definition.value`."""
        operands = self.operands(values)
        if self.operation == "*":
            return math.prod(operands) % self.modulus
        if self.operation == "-":
            return (operands[0] - sum(operands[1:])) % self.modulus
        return sum(operands) % self.modulus

    def is_correct_step(self, step: Step, known: Known) -> bool:
        """Return True for `letter = expression = value` (constants: `letter = value`) with the values of the operands.

        Operands may be in any order, except that the minuend must come first.
        """
        if len(step.equations) != 1:
            return False
        (letter, *sides), operands = step.equations[0], self.operands(known.values)
        if letter != (step.letter,) or sides[-1:] != [(str(self.value(known.values)),)]:
            return False
        if self.operation == "constant":
            return len(sides) == 1
        return len(sides) == 2 and _same_operands(sides[0], self.operation, operands)


def draw(uniform: Uniform, ops: int, *, letters: Letters = "in_order", modulus: int = MODULUS) -> Problem:
    """Draw a problem with `ops` quantities: items of the four categories, at least one of each if ops >= 4."""
    return problem_of(_rules(_items(uniform, ops), uniform, ops, modulus), uniform, letters)


def as_printed(
    uniform: Uniform,
    *,
    max_operations: int = 15,
    max_items: int = 3,
    letters: Letters = "in_order",
    modulus: int = MODULUS,
) -> Problem | None:
    """Draw a problem like the released code, with 1 ... max_items items of each category.

    The rules after `max_operations` are cut off. Return None if a rule depends on a quantity whose rule was cut off;
    the released code then fails.
    """
    quantities: list[str] = []
    for category in _CATEGORIES:
        quantities += _quantities(category, 1 + int(uniform() * max_items), uniform)
    rules = _rules(quantities, uniform, max_operations, modulus)
    try:
        return problem_of(rules, uniform, letters)
    except KeyError:  # of a quantity whose rule was cut off
        return None


def solution_order(rules: Mapping[str, Rule]) -> list[str]:
    """Return the quantities with each one after its dependencies, by a depth-first search in the order of the rules.

    Raises:
        KeyError: there is no rule for a dependency.
    """
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in order:
            for dependency in rules[name].dependencies:
                visit(dependency)
            order[name] = None

    for name in rules:
        visit(name)
    return list(order)


def problem_of(rules: Mapping[str, Rule], uniform: Uniform, letters: Letters = "in_order") -> Problem:
    """Return the problem for a graph of rules, with statements in random order and a random quantity to ask for.

    Args:
        rules: rule of each quantity, by name.
        uniform: draws from [0, 1).
        letters: letters of the quantities: a, b, c ..., or distinct random letters of a ... z, A ... Z.
    """
    if len(rules) > MAX_OPS[letters]:
        raise ValueError(f"a problem has at most {MAX_OPS[letters]} quantities, got {len(rules)}")
    names = LETTERS if letters == "in_order" else sample_distinct(LETTERS, len(rules), uniform)
    values: dict[str, int] = {}
    solution: list[str] = []
    for letter, name in zip(names, solution_order(rules), strict=False):
        rule = rules[name]
        values[name] = rule.value(values)
        solution.append(f"Define {name} as {letter} ; so {letter} ={_expression(rule, values)} {values[name]} .")
    statements = [_statement(name, rule) for name, rule in rules.items()]
    key = "\n".join(sorted(statements))
    asked = list(rules)[int(uniform() * len(rules))]
    item, category = asked.split(" in each ")
    return Problem(
        statements=tuple(sample_distinct(statements, len(statements), uniform)),
        question=f"How many {item} does {category} have ?",
        solution=tuple(solution),
        computed=tuple(rules[name].operation != "constant" for name in values),
        asked=asked,
        values=values,
        definitions=rules,
        key=key,
    )


def _items(uniform: Uniform, ops: int) -> list[str]:
    """Draw `ops` quantities: first one per category if there are enough, then others in categories with free items."""
    free = [len(category.items) for category in _CATEGORIES]
    counts = [1 if ops >= len(free) else 0] * len(free)
    while sum(counts) < ops:
        open_to = [at for at, most in enumerate(free) if counts[at] < most]
        counts[open_to[int(uniform() * len(open_to))]] += 1
    quantities: list[str] = []
    for category, count in zip(_CATEGORIES, counts, strict=True):
        quantities += _quantities(category, count, uniform)
    return quantities


def _quantities(category: Category, count: int, uniform: Uniform) -> list[str]:
    return [f"{item} in each {category.name}" for item in sample_distinct(category.items, count, uniform)]


def _rules(quantities: list[str], uniform: Uniform, max_operations: int, modulus: int) -> dict[str, Rule]:
    left = list(quantities)
    rules: dict[str, Rule] = {}
    while left and len(rules) < max_operations:
        at = int(uniform() * len(left))
        name, left[at] = left[at], left[-1]
        left.pop()
        count = int(uniform() * (min(_MOST_DEPENDENCIES, len(left)) + 1))
        operation: Operation = "constant" if count == 0 else ("+", "-", "*")[int(uniform() * 3)]
        number = 1 + int(uniform() * (modulus - 1)) if count < 2 else None
        rules[name] = Rule(operation, tuple(sample_distinct(left, count, uniform)), number, modulus)
    return rules


def _statement(name: str, rule: Rule) -> str:
    item = f"The number of {name} is"
    if rule.operation == "constant":
        return f"{item} {rule.number} ."
    first, *rest = rule.dependencies
    if not rest:
        relation = {"+": "more than", "-": "less than", "*": "times"}[rule.operation]
        return f"{item} {rule.number} {relation} the number of {first} ."
    if rule.operation == "+":
        return f"{item} the sum of the number of {' , '.join((first, *rest[:-1]))} and {rest[-1]} ."
    if rule.operation == "-":
        return f"{item} the difference between the number of {first} and the sum of {' , '.join(rest)} ."
    return f"{item} the product of the number of {' and '.join(rule.dependencies)} ."


def _expression(rule: Rule, values: Mapping[str, int]) -> str:
    """Return the text between `letter =` and the value: the expression and "=", or nothing for a constant."""
    if rule.operation == "constant":
        return ""
    operands = [str(operand) for operand in rule.operands(values)]
    if rule.operation == "-":
        return f" {operands[0]} - ( {' + '.join(operands[1:])} ) ="
    return f" {f' {rule.operation} '.join(operands)} ="


def _same_operands(words: tuple[str, ...], operation: Operation, operands: list[int]) -> bool:
    """Return True if an expression equals that of `_expression`, except for the order of summands or factors."""
    wanted = [str(operand) for operand in operands]
    if operation == "-":
        head, words = words[:3], words[3:]
        if head != (wanted[0], "-", "(") or words[-1:] != (")",):
            return False
        words, wanted, operation = words[:-1], wanted[1:], "+"
    signs = words[1::2]
    return set(signs) <= {operation} and len(words) == 2 * len(wanted) - 1 and sorted(words[::2]) == sorted(wanted)
