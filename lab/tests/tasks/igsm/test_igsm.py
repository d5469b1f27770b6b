"""Problems after Ye et al.: their structure, operations counted from the text, and implied quantities."""

from __future__ import annotations

import random
import re

import pytest

from kvshift_lab.tasks.igsm import igsm
from kvshift_lab.tasks.igsm.names import SYSTEMS
from kvshift_lab.tasks.igsm.problem import Problem
from kvshift_lab.tasks.igsm.quantities import Abstract, Instance

from .reading import defined, drawn, evaluated, igsm_formulas, names_in, problem_text, solution_text

CATEGORIES = {item: category.name for system in SYSTEMS for category in system for item in category.items}


def asked(problem: Problem) -> str:
    found = re.fullmatch(r"How many (.*) does (.*) have \?", problem.question)
    assert found
    return f"{found[2]}'s {found[1]}"


def needed(formulas: dict[str, str], name: str) -> set[str]:
    found = {name}
    for other in names_in(formulas[name]):
        found |= needed(formulas, other)
    return found


def operations(formula: str) -> int:
    """Return max(1, in-degree - 1), where the in-degree counts names and a number."""
    return max(1, len(names_in(formula)) + bool(re.match(r"\d", formula)) - 1)


@pytest.mark.parametrize(
    ("ops", "max_edges", "modulus"),
    [(1, 20, 23), (5, 20, 23), (15, 20, 23), (21, 28, 23), (5, 20, 2), (15, 20, 6), (15, 20, 7)],
)
def test_texts_say_what_the_graph_says(ops: int, max_edges: int, modulus: int):
    for problem in drawn("igsm", ops, 17, max_edges=max_edges, modulus=modulus):
        formulas = igsm_formulas(problem_text(problem), CATEGORIES)
        values = evaluated(formulas, modulus)
        assert values == {name.replace(" 's", "'s"): value for name, value in problem.values.items()}
        need = needed(formulas, asked(problem))
        assert sum(operations(formulas[name]) for name in need) == ops
        solution = list(defined(solution_text(problem)))
        assert {name for name, _, _ in solution} == need
        assert len(solution) == len(need)
        assert solution[-1][0] == asked(problem)
        before: set[str] = set()
        for name, _, value in solution:
            assert value == values[name]
            assert set(names_in(formulas[name])) <= before
            before.add(name)


@pytest.mark.parametrize("modulus", [23, 5])
def test_every_step_has_one_sign_and_a_new_letter(modulus: int):
    for problem in drawn("igsm", 15, 23, seed=1, modulus=modulus):
        values: dict[str, int] = {}
        letters: list[str] = []
        for sentence in solution_text(problem).split("\n"):
            equations = sentence.removesuffix(".").split("; ")[1:]
            for equation in equations:
                letter, first, *rest = equation.removeprefix("so ").split(" = ")
                assert equation.startswith("so ") == (equation is equations[-1])
                numbers = re.sub(r"[A-Za-z]", lambda found, known=values: str(known[found[0]]), first)
                sides = [first] if numbers == first else [first, numbers]
                expected = [*dict.fromkeys([*sides, str(eval(numbers) % modulus)])]
                assert [first, *rest] == expected
                assert len(re.findall(r"[+*-]", first)) <= 1
                values[letter] = int(expected[-1])
                letters.append(letter)
        assert len(set(letters)) == len(letters)
        assert len(letters) == 15  # each operation has one letter


def test_structures_are_within_their_bounds():
    uniform = random.Random(2).random
    for max_edges in (5, 20, 28):
        for _ in range(300):
            structure = igsm.draw_structure(uniform, max_edges)
            widths = [len(items) for items in structure.items]
            assert 2 <= len(widths) <= 4
            assert all(2 <= width <= 4 for width in widths)
            assert len(set(structure.edges)) == len(structure.edges) <= max(max_edges, 4 * (len(widths) - 1))
            held = {(layer + 1, below) for layer, _, below in structure.edges}
            assert held == {(layer, at) for layer in range(1, len(widths)) for at in range(widths[layer])}
            for category, items in zip(structure.categories, structure.items, strict=True):
                assert set(items) <= set(category.items)
                assert len(set(items)) == len(items)
            names = [category.name for category in structure.categories]
            assert any(names == [c.name for c in system][at : at + len(names)] for system in SYSTEMS for at in range(3))


@pytest.mark.parametrize("modulus", [23, 2, 6])
def test_rules_are_within_their_bounds(modulus: int):
    problems = drawn("igsm", 12, 200, seed=3, modulus=modulus)
    rules = [r for p in problems for r in p.definitions.values() if isinstance(r, Instance)]
    assert {len(rule.dependencies) for rule in rules} == {0, 1, 2, 3, 4}
    assert all(len(set(rule.dependencies)) == len(rule.dependencies) for rule in rules)
    assert {rule.number for rule in rules if rule.times} == set(range(1, modulus))
    assert {rule.number for rule in rules if not rule.times} == {None, *range(modulus)}
    assert {len(rule.dependencies) for rule in rules if rule.minus} == {2}
    assert {rule.number is None for rule in rules if not rule.dependencies} == {False}


def test_an_abstract_quantity_by_hand():
    """A house has 3 rooms A, each with 5 and 6 pens, and 4 rooms B, each with 7: 3 (5 + 6) + 4 x 7 = 15 mod 23."""
    rooms = Abstract((("H 's A", "A 's Pen"), ("H 's B", "B 's Pen")))
    pens = Abstract((("A 's x",), ("A 's y",)))
    values = {"H 's A": 3, "H 's B": 4, "A 's x": 5, "A 's y": 6, "B 's Pen": 7}
    assert pens.value(values) == 11
    assert rooms.value({**values, "A 's Pen": 11}) == 15
    assert (pens.operations, rooms.operations) == (1, 3)
    assert Abstract(pens.terms, modulus=7).value(values) == 4
    assert Abstract(rooms.terms, modulus=7).value({**values, "A 's Pen": 4}) == 5  # 12 + 28 mod 7


def test_names_never_meet():
    items = [item for system in SYSTEMS for category in system for item in category.items]
    categories = [category.name for system in SYSTEMS for category in system]
    assert len(set(items)) == len(items) == 160
    assert len(set(categories)) == len(categories) == 16
    assert not set(items) & set(categories)
    assert all(len(item.split()) >= 2 and not {"as", "in", "does", "and"} & set(item.split()) for item in items)


def test_sketches_hold_neither_names_nor_numbers():
    for problem in drawn("igsm", 10, 20, seed=5):
        assert re.fullmatch(r"(n|\d+)([+*-](n|\d+))?(;(n|\d+)([+*-](n|\d+))?)*", problem.key)
        assert len(problem.key.split(";")) == 10
