"""Problems that the generators draw, and readers of their texts that use nothing else of the package."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count as count_up
from itertools import islice
from typing import Any

from kvshift_lab.tasks.igsm import igsm, kamino
from kvshift_lab.tasks.igsm.problem import Problem
from kvshift_lab.tasks.igsm.wording import detokenize

# Formulas of quantities in Python, with the names of other quantities in quotes.
Formulas = dict[str, str]


DRAW: dict[str, Callable[..., Problem | None]] = {
    "kamino": kamino.draw,
    "kamino, random letters": partial(kamino.draw, letters="random"),
    "igsm": partial(igsm.draw, max_edges=20),
}


def drawn(generator: str, ops: int, count: int, seed: int | str = 0, **options: Any) -> list[Problem]:
    """Return problems of one of the generators in `DRAW`."""
    uniform = random.Random(seed).random
    problems = (DRAW[generator](uniform, ops, **options) for _ in count_up())
    return list(islice(filter(None, problems), count))


def problem_text(problem: Problem) -> str:
    return detokenize(" ".join((*problem.statements, problem.question)))


def solution_text(problem: Problem) -> str:
    return "\n".join(detokenize(sentence) for sentence in problem.solution)


def kamino_formulas(text: str) -> Formulas:
    """Return the formulas of a written problem; a name is "item in each category"."""
    formulas: Formulas = {}
    for name, rule in re.findall(r"The number of ([^.]*? in each \w+) is ([^.]*)\.", text):
        if found := re.fullmatch(r"(\d+)", rule):
            formula = found[1]
        elif found := re.fullmatch(r"(\d+) (more than|less than|times) the number of (.*)", rule):
            sign = {"more than": "+", "less than": "-", "times": "*"}[found[2]]
            formula = f"{found[3]!r} {sign} {found[1]}"
        elif found := re.fullmatch(r"the difference between the number of (.*) and the sum of (.*)", rule):
            formula = f"{found[1]!r} - ({' + '.join(map(repr, found[2].split(', ')))})"
        else:
            found = re.fullmatch(r"the (sum|product) of the number of (.*)", rule)
            assert found, rule
            sign = {"sum": " + ", "product": " * "}[found[1]]
            formula = sign.join(map(repr, re.split(r", | and ", found[2])))
        assert name not in formulas
        formulas[name] = formula
    return formulas


def igsm_formulas(text: str, categories: Mapping[str, str]) -> Formulas:
    """Return the formulas that a written problem states or implies; `categories` are those of all items."""
    formulas: Formulas = {}
    for name, rule in re.findall(r"The number of each (.*?) equals ([^.]*)\.", text):
        number, _, base = rule.rpartition(" more than ")
        if not number:
            number, _, base = rule.rpartition(" times as much as ")
        sign = "*" if " times " in rule else "+"
        if rule.isdigit():
            number, base = "", rule
        names = re.split(r", | and ", base.removeprefix("the sum of ").removeprefix("the difference of "))
        names = [each.removeprefix("each ") for each in names]
        joined = (" - " if "the difference of" in base else " + ").join(map(repr, names))
        formulas[name] = rule if rule.isdigit() else f"{number} {sign} ({joined})" if number else joined
        assert len(names) == 2 or "difference" not in rule
    held: dict[str, list[str]] = {}
    for name in formulas:
        whole, part = name.split("'s ")
        held.setdefault(whole, []).append(part)

    def implied(whole: str, category: str) -> str:
        terms = []
        for part in held.get(whole, ()):
            if categories[part] == category:
                terms.append(repr(f"{whole}'s {part}"))
            elif below := implied(part, category):
                terms.append(f"{whole + chr(39) + 's ' + part!r} * {part + chr(39) + 's ' + category!r}")
                formulas[f"{part}'s {category}"] = below
        return " + ".join(terms)

    for whole in list(held):
        for category in set(categories.values()):
            if formula := implied(whole, category):
                formulas[f"{whole}'s {category}"] = formula
    return formulas


def names_in(formula: str) -> list[str]:
    return [found[0] or found[1] for found in re.findall(r"'([^']+)'|\"([^\"]+)\"", formula)]


def evaluated(formulas: Formulas, modulus: int = 23) -> dict[str, int]:
    """Return the value of every quantity modulo `modulus`."""
    values: dict[str, int] = {}

    def value(name: str) -> int:
        if name not in values:
            known = {repr(each): str(value(each)) for each in names_in(formulas[name])}
            text = formulas[name]
            for each, number in known.items():
                text = text.replace(each, number)
            assert re.fullmatch(r"[0-9 +*()-]+", text), text
            values[name] = eval(text) % modulus
        return values[name]

    for name in formulas:
        value(name)
    return values


def defined(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield name, letter and value of each sentence of a written solution."""
    for sentence in text.split("\n"):
        found = re.fullmatch(r"Define (.*) as (\w); .*= (\d+)\.", sentence)
        assert found, sentence
        yield found[1], found[2], int(found[3])
