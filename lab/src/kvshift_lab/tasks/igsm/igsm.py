"""Problems after Ye et al., "Physics of language models: part 2.1" (2024), at their original scale of difficulty.

A structure graph has two to four categories as layers; an item may hold items of the next layer. Each such edge is an
*instance* quantity, "how many of B does each A hold", which a statement defines. The number of items of a category that
an item holds is an *abstract* quantity, which is never stated and must be derived from the structure.

    The number of each Maple Street High's Drama Room equals 5 more than the sum of each Drama Room's Trail Pack and
    each Map Hall's Sling Bag. [...] How many Backpack does Maple Street High have?

    Define Drama Room's Trail Pack as q; so q = 7.
    Define Map Hall's Sling Bag as B; so B = 20.
    Define Maple Street High's Drama Room as e; w = q + B = 7 + 20 = 4; so e = 5 + w = 5 + 4 = 9.
    Define Drama Room's Backpack as d; so d = q = 7.
    Define Maple Street High's Backpack as k; so k = e * d = 9 * 7 = 17.

The solution defines only the quantities that are needed. All values are modulo 23 or a smaller number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvshift_lab.tasks.igsm.names import SYSTEMS, Category
from kvshift_lab.tasks.igsm.problem import Problem
from kvshift_lab.tasks.igsm.quantities import Abstract, Instance
from kvshift_lab.tasks.igsm.random_choices import Uniform, sample_distinct
from kvshift_lab.tasks.igsm.wording import MODULUS
from kvshift_lab.tasks.igsm.writing import Writing, statement

_MOST_DEPENDENCIES = 4


@dataclass(frozen=True, slots=True)
class Structure:
    """A graph that states which items hold which others.

    Attributes:
        categories: categories of the layers, outermost first.
        items: names of the items, by layer.
        edges: (layer, item, item of the next layer), as indices.
    """

    categories: tuple[Category, ...]
    items: tuple[tuple[str, ...], ...]
    edges: tuple[tuple[int, int, int], ...]


def draw(uniform: Uniform, ops: int, max_edges: int, *, modulus: int = MODULUS) -> Problem | None:
    """Draw a problem with `ops` operations; return None if no quantity of the drawn graph needs as many."""
    structure = draw_structure(uniform, max_edges)
    definitions, stated = _dependencies(structure, uniform, modulus)
    asked = [name for name, count in _operations(definitions).items() if count == ops]
    if not asked:
        return None
    return _problem(definitions, stated, asked[int(uniform() * len(asked))], uniform, modulus)


def draw_structure(uniform: Uniform, max_edges: int) -> Structure:
    """Draw a structure of depth d in 2 ... 4, with w_0 ... w_1 items per layer, 2 <= w_0 <= w_1 <= 4, and e edges:

        e = max{ min{ t_0, t_1, (d - 1) w_1^2 }, (d - 1) w_0 },   t_0, t_1 uniform in 1 ... max_edges

    Every item except those of the first layer is held by at least one item.
    """
    depth = 2 + int(uniform() * 3)
    narrow, wide = sorted((2 + int(uniform() * 3), 2 + int(uniform() * 3)))
    tries = (1 + int(uniform() * max_edges), 1 + int(uniform() * max_edges), (depth - 1) * wide**2)
    count = max(min(tries), (depth - 1) * narrow)
    widths = _widths(uniform, depth, narrow, wide, count)

    system = SYSTEMS[int(uniform() * len(SYSTEMS))]
    start = int(uniform() * (len(system) - depth + 1))
    categories = system[start : start + depth]
    items = [
        sample_distinct(category.items, width, uniform) for category, width in zip(categories, widths, strict=True)
    ]
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
    held += sample_distinct(others, count - len(held), uniform)
    return Structure(categories, tuple(map(tuple, items)), tuple(held))


def _widths(uniform: Uniform, depth: int, narrow: int, wide: int, edges: int) -> list[int]:
    """Draw the number of items in each layer, such that all edges are possible and each item can be held."""
    widths = [narrow] * depth
    growing = uniform()
    while True:
        possible = sum(above * below for above, below in pairwise(widths))
        open_to = [at for at, width in enumerate(widths) if width < wide]
        if possible >= edges:
            # every item except those of the first layer needs an edge
            open_to = [at for at in open_to if at == 0 or sum(widths[1:]) < edges]
            if not open_to or uniform() >= growing:
                return widths
        widths[open_to[int(uniform() * len(open_to))]] += 1


def _dependencies(
    structure: Structure, uniform: Uniform, modulus: int
) -> tuple[dict[str, Instance | Abstract], list[str]]:
    """Draw the definitions of all quantities, each after its dependencies; also return the names of all instances.

    Instance quantities are defined in random order. Each depends on up to four of the quantities defined before it, and
    all sets of a size are equally likely. An abstract quantity is defined as soon as all of its parts are.
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

    for name in sample_distinct(stated, len(stated), uniform):
        count = int(uniform() * (min(_MOST_DEPENDENCIES, len(there)) + 1))
        dependencies = tuple(sample_distinct(there, count, uniform))
        minus = count == 2 and uniform() < 0.5
        if count and uniform() < 0.5:
            arrive(name, Instance(dependencies, minus, modulus=modulus))
            continue
        times = count > 0 and uniform() < 0.5
        number = 1 + int(uniform() * (modulus - 1)) if times else int(uniform() * modulus)
        arrive(name, Instance(dependencies, minus, number, times, modulus))
    return definitions, stated


def _abstract(structure: Structure, modulus: int) -> dict[str, Abstract]:
    """Return the definitions of all nonempty counts of a category in an item of a higher layer."""
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
    """Return for each quantity the total number of operations that it and all quantities that it needs take."""
    needs: dict[str, int] = {}  # the needed quantities as a bit mask, in the order of the definitions
    cost: dict[int, int] = {}  # by number of operations, a bit mask of the quantities that take as many
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
    writing = Writing(values, uniform, modulus)
    for name, definition in definitions.items():
        if name in needed:
            writing.define(name, definition)
    statements = [
        statement(name, definition) for name in stated if isinstance(definition := definitions[name], Instance)
    ]
    whole, part = asked.split(" 's ")
    return Problem(
        statements=tuple(sample_distinct(statements, len(statements), uniform)),
        question=f"How many {part} does {whole} have ?",
        solution=tuple(writing.sentences),
        computed=tuple(writing.computed),
        asked=asked,
        values=values,
        definitions=definitions,
        key=";".join(writing.sketch),
    )
