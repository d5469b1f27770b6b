"""Problems after kaminocode/iGSM: its published statistics, and texts that agree with their graphs."""

from __future__ import annotations

import random
import statistics
import string
from collections import Counter

import pytest

from kvshift_lab.tasks.igsm import kamino
from kvshift_lab.tasks.igsm.problem import Problem

from .reading import defined, drawn, evaluated, kamino_formulas, names_in, problem_text, solution_text


def needed(problem: Problem) -> set[str]:
    found: set[str] = set()
    left = [problem.asked]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += problem.definitions[name].dependencies
    return found


def is_constant(problem: Problem, name: str) -> bool:
    return not problem.definitions[name].dependencies


@pytest.mark.parametrize(
    ("ops", "modulus"), [(1, 23), (2, 23), (3, 23), (7, 23), (15, 23), (26, 23), (1, 2), (7, 6), (15, 7), (26, 22)]
)
def test_texts_say_what_the_graph_says(ops: int, modulus: int):
    for problem in drawn("kamino", ops, 23, modulus=modulus):
        formulas = kamino_formulas(problem_text(problem))
        assert len(formulas) == ops == len(problem.statements) == len(problem.solution)
        assert {name: sorted(names_in(formula)) for name, formula in formulas.items()} == {
            name: sorted(rule.dependencies) for name, rule in problem.definitions.items()
        }
        assert evaluated(formulas, modulus) == problem.values
        assert [value for *_, value in defined(solution_text(problem))] == list(problem.values.values())


@pytest.mark.parametrize(
    ("letters", "ops"), [("in_order", 1), ("in_order", 4), ("in_order", 13), ("in_order", 26), ("random", 40)]
)
def test_solutions_define_everything_once_after_what_it_depends_on(letters: kamino.Letters, ops: int):
    for problem in drawn("kamino", ops, 19, seed=1, letters=letters):
        known: dict[str, int] = {}
        assert len({letter for _, letter, _ in defined(solution_text(problem))}) == ops
        for at, (name, letter, value) in enumerate(defined(solution_text(problem))):
            assert letters == "random" or letter == chr(ord("a") + at)
            assert set(problem.definitions[name].dependencies) <= known.keys()
            known[name] = value
        assert known == problem.values


def test_random_letters_are_all_alike_at_every_position():
    problems = drawn("kamino", 3, 2080, seed=7, letters="random")
    for at in range(3):
        counts = Counter(list(defined(solution_text(problem)))[at][1] for problem in problems)
        assert set(counts) == set(string.ascii_letters)
        statistic = sum((count - 40) ** 2 / 40 for count in counts.values())
        assert statistic < 87.97  # chi-squared, 51 degrees of freedom: one in a thousand


def test_a_solution_by_hand():
    """The order is depth first from the first rule, with dependencies in their order, and numbers after them."""
    names = [f"{item} in each School" for item in ("One High", "Two High", "Three High", "Four High", "Five High")]
    one, two, three, four, five = names
    rules = {
        one: kamino.Rule("-", (two, three, four), None),
        four: kamino.Rule("*", (five,), 9),
        two: kamino.Rule("constant", (), 5),
        three: kamino.Rule("-", (four,), 20),
        five: kamino.Rule("constant", (), 7),
    }
    problem = kamino.problem_of(rules, lambda: 0.0)
    assert solution_text(problem).split("\n") == [
        "Define Two High in each School as a; so a = 5.",
        "Define Five High in each School as b; so b = 7.",
        "Define Four High in each School as c; so c = 7 * 9 = 17.",
        "Define Three High in each School as d; so d = 17 - (20) = 20.",
        "Define One High in each School as e; so e = 5 - (20 + 17) = 14.",
    ]
    assert problem.computed == (False, False, True, True, True)
    assert problem_text(problem) == (
        "The number of One High in each School is the difference between the number of Two High in each School and the "
        "sum of Three High in each School, Four High in each School. "
        "The number of Four High in each School is 9 times the number of Five High in each School. "
        "The number of Two High in each School is 5. "
        "The number of Three High in each School is 20 less than the number of Four High in each School. "
        "The number of Five High in each School is 7. "
        "How many One High does School have?"
    )


def test_a_solution_by_another_modulus_with_random_letters():
    """4 x 3 = 2 and 2 - 4 = 3, mod 5. The letters are as drawn."""
    names = [f"{item} in each School" for item in ("One High", "Two High", "Three High")]
    one, two, three = names
    rules = {
        one: kamino.Rule("-", (two, three), None, 5),
        two: kamino.Rule("*", (three,), 3, 5),
        three: kamino.Rule("constant", (), 4, 5),
    }
    problem = kamino.problem_of(rules, iter((0.0, 0.99, 0.5, *[0.0] * 9)).__next__, "random")
    assert solution_text(problem).split("\n") == [
        "Define Three High in each School as a; so a = 4.",
        "Define Two High in each School as Z; so Z = 4 * 3 = 2.",
        "Define One High in each School as B; so B = 2 - (4) = 3.",
    ]


def test_items_are_spread_over_the_categories():
    for ops, least in ((3, 0), (4, 1), (26, 1)):
        for problem in drawn("kamino", ops, 29, seed=2):
            counts = [
                sum(name.endswith(f"each {c}") for name in problem.values)
                for c in ("School", "Classroom", "Backpack", "Stationery")
            ]
            assert sum(counts) == ops
            assert least <= min(counts)
            assert max(counts) <= 10


def test_statistics_of_the_released_law():
    """The experiments have 4 to 12 quantities, 8 on average, 2.6 of them needed; 39 % of queries ask for a constant."""
    uniform = random.Random(3).random
    problems = [problem for _ in range(4000) if (problem := kamino.as_printed(uniform))]
    assert len(problems) == 4000
    sizes = [len(problem.values) for problem in problems]
    assert (min(sizes), max(sizes)) == (4, 12)
    assert statistics.mean(sizes) == pytest.approx(8, abs=4 * 1.63 / 4000**0.5)
    constants = statistics.mean(is_constant(problem, problem.asked) for problem in problems)
    assert constants == pytest.approx(0.39, abs=0.005 + 3 * (0.39 * 0.61 / 4000) ** 0.5)  # published with two digits
    sub_graphs = [len(needed(problem)) for problem in problems]
    error = 3 * statistics.stdev(sub_graphs) / 4000**0.5
    assert statistics.mean(sub_graphs) == pytest.approx(2.6, abs=0.05 + error)


@pytest.mark.parametrize(("max_operations", "low", "high"), [(12, 0.0, 0.0), (8, 0.34, 0.42), (7, 0.58, 0.66)])
def test_cut_graphs_fail_in_the_solution(max_operations: int, low: float, high: float):
    """The pool has up to 12 quantities; with fewer operations, most problems that lose one fail."""
    uniform = random.Random(4).random
    failed = 0
    for _ in range(2000):
        problem = kamino.as_printed(uniform, max_operations=max_operations)
        assert problem is None or len(problem.solution) <= max_operations
        failed += problem is None
    assert low <= failed / 2000 <= high


@pytest.mark.parametrize("modulus", [2, 7])
def test_numbers_are_below_the_modulus(modulus: int):
    uniform = random.Random(8).random
    for problems in (
        drawn("kamino", 9, 60, modulus=modulus),
        [problem for _ in range(60) if (problem := kamino.as_printed(uniform, modulus=modulus))],
    ):
        rules = [rule for problem in problems for rule in problem.definitions.values() if isinstance(rule, kamino.Rule)]
        assert {rule.number for rule in rules} == {None, *range(1, modulus)}
        assert {value for problem in problems for value in problem.values.values()} == set(range(modulus))


def test_rules_are_drawn_as_released():
    """Operations and numbers are uniform; the last rule is always a constant, and the last but one half the time."""
    problems = drawn("kamino", 12, 700, seed=5)
    rules = [r for problem in problems for r in problem.definitions.values() if isinstance(r, kamino.Rule)]
    operations = [rule.operation for rule in rules if rule.dependencies]
    for sign in "+-*":
        assert operations.count(sign) / len(operations) == pytest.approx(1 / 3, abs=3 * 0.471 / len(operations) ** 0.5)
    numbers = [rule.number for rule in rules if rule.number is not None]
    assert (min(numbers), max(numbers)) == (1, 22)
    assert statistics.mean(numbers) == pytest.approx(11.5, abs=3 * 6.34 / len(numbers) ** 0.5)
    assert all((rule.number is None) == (len(rule.dependencies) > 1) for rule in rules)
    by_order = [[len(rule.dependencies) for rule in problem.definitions.values()] for problem in problems]
    assert {counts[-1] for counts in by_order} == {0}
    assert statistics.mean(counts[-2] for counts in by_order) == pytest.approx(0.5, abs=3 * 0.5 / 700**0.5)
    assert statistics.mean(counts[0] for counts in by_order) == pytest.approx(1.5, abs=3 * 1.118 / 700**0.5)


def test_more_quantities_than_letters_are_refused():
    rules = {f"Item {at} in each School": kamino.Rule("constant", (), 1) for at in range(27)}
    with pytest.raises(ValueError, match="at most 26 quantities, got 27"):
        kamino.problem_of(rules, lambda: 0.0)
    assert len(kamino.problem_of(rules, lambda: 0.0, "random").solution) == 27
    more = {f"Item {at} in each School": kamino.Rule("constant", (), 1) for at in range(41)}
    with pytest.raises(ValueError, match="at most 40 quantities, got 41"):
        kamino.problem_of(more, lambda: 0.0, "random")
