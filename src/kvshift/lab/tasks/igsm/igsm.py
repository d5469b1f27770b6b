"""Problems after Ye et al., "Physics of language models: part 2.1" (2024), at the real scale of difficulty.

A structure graph has two to four categories as layers; an item may hold items of the next layer. Each such edge is an
*instance* quantity, "how many of B does each A hold", which a statement defines. How many items of a whole category an
item holds is an *abstract* quantity: implied by the structure, never stated, to be derived.

    The number of each Maple Street High's Drama Room equals 5 more than the sum of each Drama Room's Trail Pack and
    each Map Hall's Sling Bag. [...] How many Backpack does Maple Street High have?

    Define Drama Room's Trail Pack as q; so q = 7.
    Define Map Hall's Sling Bag as B; so B = 20.
    Define Maple Street High's Drama Room as e; w = q + B = 7 + 20 = 4; so e = 5 + w = 5 + 4 = 9.
    Define Drama Room's Backpack as d; so d = q = 7.
    Define Maple Street High's Backpack as k; so k = e * d = 9 * 7 = 17.

The solution defines what is needed and nothing else; all is modulo 23, or a smaller number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvshift.lab.tasks.igsm.drawing import Uniform, chosen
from kvshift.lab.tasks.igsm.names import SYSTEMS, Category
from kvshift.lab.tasks.igsm.polynomial import Polynomial, combined, constant, quantity, reduced
from kvshift.lab.tasks.igsm.problem import Known, Problem, Step
from kvshift.lab.tasks.igsm.text import LETTERS, MODULUS

__all__ = ["Abstract", "Instance", "draw", "draw_structure"]

_MOST_DEPENDENCIES = 4


@dataclass(frozen=True, slots=True)
class Instance:
    """What a statement says: of the dependencies d_1 ... d_n a base, and a number r with it, or alone, or absent

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
        """max(1, in-degree - 1), the number counted."""
        return max(1, len(self.dependencies) + (self.number is not None) - 1)

    def value(self, values: Mapping[str, int]) -> int:
        """See `Definition.value`."""
        first, *rest = [values[name] for name in self.dependencies] or [0]
        base = first - sum(rest) if self.minus else first + sum(rest)
        if self.number is None:
            return base % self.modulus
        return (self.number * base if self.times else self.number + base) % self.modulus

    def agrees(self, step: Step, known: Known) -> bool:
        """See `_agrees`."""
        base: Polynomial = {}
        for at, name in enumerate(self.dependencies):
            base = combined(base, "-" if self.minus and at else "+", quantity(name))
        if self.number is not None:
            base = combined(constant(self.number), "*" if self.times else "+", base)
        return _agrees(step, known, base, self.modulus)


@dataclass(frozen=True, slots=True)
class Abstract:
    """The sum of products that counts a category in an item: of the items it holds, times what each of them holds.

    All modulo `modulus`.
    """

    terms: tuple[tuple[str, ...], ...]
    modulus: int = MODULUS

    @property
    def dependencies(self) -> tuple[str, ...]:
        """All names in the terms."""
        return tuple(name for term in self.terms for name in term)

    @property
    def operations(self) -> int:
        """max(1, in-degree - 1)."""
        return max(1, len(self.dependencies) - 1)

    def value(self, values: Mapping[str, int]) -> int:
        """See `Definition.value`."""
        return sum(math.prod(values[name] for name in term) for term in self.terms) % self.modulus

    def agrees(self, step: Step, known: Known) -> bool:
        """See `_agrees`."""
        total: Polynomial = {}
        for term in self.terms:
            product = constant(1)
            for name in term:
                product = combined(product, "*", quantity(name))
            total = combined(total, "+", product)
        return _agrees(step, known, total, self.modulus)


@dataclass(frozen=True, slots=True)
class Structure:
    """Which items hold which.

    Attributes:
        categories: of the layers, from the outermost.
        items: their names, by layer.
        edges: (layer, item, item of the next layer), by number.
    """

    categories: tuple[Category, ...]
    items: tuple[tuple[str, ...], ...]
    edges: tuple[tuple[int, int, int], ...]


def draw(uniform: Uniform, ops: int, max_edges: int, *, modulus: int = MODULUS) -> Problem | None:
    """A problem with `ops` operations, or None where the graph that was drawn has no quantity that takes as many."""
    structure = draw_structure(uniform, max_edges)
    definitions, stated = _dependencies(structure, uniform, modulus)
    asked = [name for name, count in _operations(definitions).items() if count == ops]
    if not asked:
        return None
    return _problem(definitions, stated, asked[int(uniform() * len(asked))], uniform, modulus)


def draw_structure(uniform: Uniform, max_edges: int) -> Structure:
    """Depth d in 2 ... 4, w_0 <= w_1 in 2 ... 4 items a layer, and e edges:

        e = max{ min{ t_0, t_1, (d - 1) w_1^2 }, (d - 1) w_0 },   t_0, t_1 uniform in 1 ... max_edges

    Every item but those of the first layer is held by one at least.
    """
    depth = 2 + int(uniform() * 3)
    narrow, wide = sorted((2 + int(uniform() * 3), 2 + int(uniform() * 3)))
    tries = (1 + int(uniform() * max_edges), 1 + int(uniform() * max_edges), (depth - 1) * wide**2)
    count = max(min(tries), (depth - 1) * narrow)
    widths = _widths(uniform, depth, narrow, wide, count)

    system = SYSTEMS[int(uniform() * len(SYSTEMS))]
    start = int(uniform() * (len(system) - depth + 1))
    categories = system[start : start + depth]
    items = [chosen(category.items, width, uniform) for category, width in zip(categories, widths, strict=True)]
    held = [
        (layer, int(uniform() * widths[layer]), below)
        for layer in range(depth - 1)
        for below in range(widths[layer + 1])
    ]
    others = [
        (layer, above, below)
        for layer in range(depth - 1)
        for above in range(widths[layer])
        for below in range(widths[layer + 1])
        if (layer, above, below) not in held
    ]
    held += chosen(others, count - len(held), uniform)
    return Structure(categories, tuple(map(tuple, items)), tuple(held))


def _widths(uniform: Uniform, depth: int, narrow: int, wide: int, edges: int) -> list[int]:
    """Items of each layer, such that there is room for all edges and each item can be held."""
    widths = [narrow] * depth
    growing = uniform()
    while True:
        room = sum(above * below for above, below in pairwise(widths))
        open_to = [at for at, width in enumerate(widths) if width < wide]
        if room >= edges:
            # an item of the first layer needs no edge, each of the others one
            open_to = [at for at in open_to if at == 0 or sum(widths[1:]) < edges]
            if not open_to or uniform() >= growing:
                return widths
        widths[open_to[int(uniform() * len(open_to))]] += 1


def _dependencies(
    structure: Structure, uniform: Uniform, modulus: int
) -> tuple[dict[str, Instance | Abstract], list[str]]:
    """A definition of every quantity, each after those it depends on; and the names of those that are stated.

    Instance quantities come in random order. Each depends on up to four of those that are there by then, all sets of
    a size being as likely; an abstract quantity is there as soon as all of its parts are.
    """
    waiting = _abstract(structure, modulus)
    missing = {name: len(abstract.dependencies) for name, abstract in waiting.items()}
    users: dict[str, list[str]] = {}
    for name, abstract in waiting.items():
        for part in abstract.dependencies:
            users.setdefault(part, []).append(name)
    items = structure.items
    stated = [f"{items[layer][above]} 's {items[layer + 1][below]}" for layer, above, below in structure.edges]
    there: list[str] = []
    definitions: dict[str, Instance | Abstract] = {}

    def arrive(name: str, definition: Instance | Abstract) -> None:
        definitions[name] = definition
        there.append(name)
        for user in users.get(name, ()):
            missing[user] -= 1
            if not missing[user]:
                arrive(user, waiting[user])

    for name in chosen(stated, len(stated), uniform):
        count = int(uniform() * (min(_MOST_DEPENDENCIES, len(there)) + 1))
        dependencies = tuple(chosen(there, count, uniform))
        minus = count == 2 and uniform() < 0.5
        if count and uniform() < 0.5:
            arrive(name, Instance(dependencies, minus, modulus=modulus))
            continue
        times = count > 0 and uniform() < 0.5
        number = 1 + int(uniform() * (modulus - 1)) if times else int(uniform() * modulus)
        arrive(name, Instance(dependencies, minus, number, times, modulus))
    return definitions, stated


def _abstract(structure: Structure, modulus: int) -> dict[str, Abstract]:
    """Every count of a category in an item of a layer above it that is not empty."""
    items, categories = structure.items, structure.categories
    held: dict[tuple[int, int], list[int]] = {}
    for layer, above, below in structure.edges:
        held.setdefault((layer, above), []).append(below)
    found: dict[str, Abstract] = {}
    for layer in reversed(range(len(items) - 1)):
        for above, name in enumerate(items[layer]):
            parts = [items[layer + 1][below] for below in held.get((layer, above), ())]
            if parts:
                counted = tuple((f"{name} 's {part}",) for part in parts)
                found[f"{name} 's {categories[layer + 1].name}"] = Abstract(counted, modulus)
            for category in categories[layer + 2 :]:
                through = [part for part in parts if f"{part} 's {category.name}" in found]
                if through:
                    terms = tuple((f"{name} 's {part}", f"{part} 's {category.name}") for part in through)
                    found[f"{name} 's {category.name}"] = Abstract(terms, modulus)
    return found


def _operations(definitions: Mapping[str, Instance | Abstract]) -> dict[str, int]:
    """Of every quantity, the operations that it and all that it needs take together."""
    needs: dict[str, int] = {}  # as the bits of a number, by the order of the definitions
    cost: dict[int, int] = {}  # those that take so many operations
    for at, (name, definition) in enumerate(definitions.items()):
        needed = 1 << at
        for dependency in definition.dependencies:
            needed |= needs[dependency]
        needs[name] = needed
        cost[definition.operations] = cost.get(definition.operations, 0) | 1 << at
    return {
        name: sum(count * (needed & which).bit_count() for count, which in cost.items())
        for name, needed in needs.items()
    }


def _problem(
    definitions: Mapping[str, Instance | Abstract], stated: Sequence[str], asked: str, uniform: Uniform, modulus: int
) -> Problem:
    needed = {asked}
    for name in reversed(list(definitions)):
        if name in needed:
            needed.update(definitions[name].dependencies)
    values: dict[str, int] = {}
    for name, definition in definitions.items():
        values[name] = definition.value(values)
    writing = _Writing(values, uniform, modulus)
    for name, definition in definitions.items():
        if name in needed:
            writing.define(name, definition)
    statements = [
        _statement(name, definition) for name in stated if isinstance(definition := definitions[name], Instance)
    ]
    whole, part = asked.split(" 's ")
    return Problem(
        statements=tuple(chosen(statements, len(statements), uniform)),
        question=f"How many {part} does {whole} have ?",
        solution=tuple(writing.sentences),
        computed=tuple(writing.computed),
        asked=asked,
        values=values,
        definitions=definitions,
        key=";".join(writing.sketch),
    )


def _statement(name: str, instance: Instance) -> str:
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
class _Writing:
    """A solution as it is written: letters are drawn as they are needed, none twice.

    The sketch is what is left of it without names and numbers: which step combines which, by what sign.
    """

    values: Mapping[str, int]
    uniform: Uniform
    modulus: int
    sentences: list[str] = field(default_factory=list)
    computed: list[bool] = field(default_factory=list)
    sketch: list[str] = field(default_factory=list)
    _letters: list[str] = field(default_factory=lambda: list(LETTERS))
    _letter_of: dict[str, str] = field(default_factory=dict)
    _value_of: dict[str, int] = field(default_factory=dict)  # of letters, and of numbers as they are written
    _mark_of: dict[str, str] = field(default_factory=dict)

    def define(self, name: str, definition: Instance | Abstract) -> None:
        """Write the sentence that defines a quantity, all that it depends on being defined."""
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
        """Signs that the sentence will hold."""
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


def _agrees(step: Step, known: Known, wanted: Polynomial, modulus: int) -> bool:
    """Whether a step computes `wanted`, in whatever order and with whatever auxiliary letters.

    Each equation must read `X = expression [= the same in numbers] = value`: an expression is one letter or number, or
    two with a sign between; the second part stands where there are two and one of them is a letter.
    """
    found: dict[str, tuple[Polynomial, int]] = {}

    def operand(word: str) -> tuple[Polynomial, int] | None:
        if word.isdigit() and word == str(int(word) % modulus):
            return constant(int(word)), int(word)
        name = known.letters.get(word)
        return (quantity(name), known.values[name]) if name is not None else found.get(word)

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
            polynomial = combined(polynomial, sign, other[0])
            value = {"+": value + other[1], "-": value - other[1], "*": value * other[1]}[sign] % modulus
        if (str(value),) != chain[-1]:
            chain.append((str(value),))
        if sides != chain:
            return False
        found[target[0]] = polynomial, value
    if step.equations[-1][0] != (step.letter,):
        return False
    return reduced(found[step.letter][0], modulus) == reduced(wanted, modulus)
