"""The judges accept every true solution and no false one; the paper's rule also accepts some that are half wrong."""

from __future__ import annotations

import re

import pytest

from kvshift_lab.tasks.igsm import kamino
from kvshift_lab.tasks.igsm.checker import check_solution
from kvshift_lab.tasks.igsm.problem import Problem
from kvshift_lab.tasks.igsm.quantities import Instance

from .reading import DRAW, drawn, solution_text

RIGHT = {"paper": True, "strict": True}
LENIENT = {"paper": True, "strict": False}
WRONG = {"paper": False, "strict": False}
GENERATORS = tuple(DRAW)


def asked_line(problem: Problem) -> int:
    return list(problem.definitions and [s.split(" as ")[0] for s in problem.solution]).index(f"Define {problem.asked}")


@pytest.mark.parametrize("modulus", [23, 6])
@pytest.mark.parametrize("ops", [1, 3, 8, 15])
@pytest.mark.parametrize("generator", GENERATORS)
def test_every_true_solution_is_right(generator: str, ops: int, modulus: int):
    for problem in drawn(generator, ops, 61, modulus=modulus):
        assert check_solution(problem, solution_text(problem)) == RIGHT
        assert check_solution(problem, " \n ".join(problem.solution)) == RIGHT
        assert check_solution(problem, " ".join(problem.solution)) == RIGHT


@pytest.mark.parametrize("generator", ["kamino", "igsm"])
def test_what_follows_the_answer_counts_in_neither(generator: str):
    for problem in drawn(generator, 7, 31):
        for junk in ("Define Gel Pen as z; so z = 99.", "so so so.", "Define", problem.solution[0], "\n\n.."):
            assert check_solution(problem, f"{solution_text(problem)}\n{junk}") == RIGHT


@pytest.mark.parametrize(("modulus", "change"), [(23, 1), (7, 1), (7, 7)])
@pytest.mark.parametrize("generator", ["kamino", "igsm"])
def test_a_wrong_number_anywhere_is_caught(generator: str, modulus: int, change: int):
    """One number at a time is replaced or not reduced: "strict" rejects all of these, "paper" only wrong answers."""
    for problem in drawn(generator, 6, 31, modulus=modulus):
        last = asked_line(problem)
        for at, sentence in enumerate(problem.solution[: last + 1]):
            words = sentence.split(" ")
            for place, word in enumerate(words):
                if not word.isdigit():
                    continue
                changed = [*words[:place], str((int(word) + change) % 23), *words[place + 1 :]]
                text = "\n".join([*problem.solution[:at], " ".join(changed), *problem.solution[at + 1 :]])
                is_answer = at == last and place == len(words) - 2
                assert check_solution(problem, text) == (WRONG if is_answer else LENIENT)


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_wrong_letter_anywhere_is_caught(generator: str):
    """Each letter that stands for a quantity is replaced by an unused one."""
    for problem in drawn(generator, 6, 31):
        last = asked_line(problem)
        unused = (
            "Q"
            if generator == "kamino"  # it uses a ... f
            else next(c for c in "QRSTUVWXYZ" if f" {c} " not in " ".join(problem.solution))
        )
        for at, sentence in enumerate(problem.solution[: last + 1]):
            start = sentence.index(" as ") + 1
            for found in re.finditer(r"\b[A-Za-z]\b", sentence[start:]):
                place = start + found.start()
                changed = sentence[:place] + unused + sentence[place + 1 :]
                text = "\n".join([*problem.solution[:at], changed, *problem.solution[at + 1 :]])
                assert check_solution(problem, text) == LENIENT


@pytest.mark.parametrize("generator", ["kamino", "igsm"])
def test_a_missing_line_is_caught_where_it_is_needed(generator: str):
    caught = 0
    for problem in drawn(generator, 8, 41):
        last = asked_line(problem)
        names = [sentence.removeprefix("Define ").split(" as ")[0] for sentence in problem.solution]
        for at in range(last):
            used = any(names[at] in problem.definitions[name].dependencies for name in names[at + 1 : last + 1])
            text = "\n".join(problem.solution[:at] + problem.solution[at + 1 :])
            assert check_solution(problem, text) == (LENIENT if used else RIGHT)
            caught += used
        without = "\n".join(problem.solution[:last] + problem.solution[last + 1 :])
        assert check_solution(problem, without) == WRONG
    assert caught > 41


@pytest.mark.parametrize("generator", ["kamino", "igsm"])
def test_steps_before_the_answer_must_all_be_steps(generator: str):
    for problem in drawn(generator, 5, 23):
        for junk in ("", "Define Gel Pen as z; so z = 3", "so a = 3", "Define X; so X = 3"):
            assert check_solution(problem, f"{junk}.\n{solution_text(problem)}") == LENIENT
        twice = f"{problem.solution[0]}\n{solution_text(problem)}"
        assert check_solution(problem, twice)["strict"] == (asked_line(problem) == 0)


@pytest.mark.parametrize("generator", ["kamino", "igsm"])
def test_a_wrong_definition_with_the_right_value_is_caught(generator: str):
    """A line computes the right value, but defines another quantity, or copies the value."""
    for problem in drawn(generator, 6, 31):
        last = asked_line(problem)
        names = [sentence.removeprefix("Define ").split(" as ")[0] for sentence in problem.solution]
        for at in range(last):
            other = names[at + 1]
            sentence = problem.solution[at].replace(f"Define {names[at]} as", f"Define {other} as")
            text = "\n".join([*problem.solution[:at], sentence, *problem.solution[at + 1 :]])
            found = check_solution(problem, text)
            same = problem.values[other] == problem.values[names[at]] and other == problem.asked
            assert found["paper"]
            if not same:
                assert not found["strict"]
        if problem.computed[last]:
            letter = problem.solution[last].split(" as ")[1][0]
            copied = f"Define {problem.asked} as {letter} ; so {letter} = {problem.answer} ."
            assert check_solution(problem, "\n".join([*problem.solution[:last], copied])) == LENIENT


def test_two_wrongs_that_give_the_right_value_are_caught():
    """The operands are other quantities with the same sum: the answer's value is right, and the definition is not."""
    names = [f"{item} in each School" for item in ("One High", "Two High", "Three High", "Four High", "Five High")]
    rules = {
        names[4]: kamino.Rule("+", (names[0], names[1]), None),
        names[0]: kamino.Rule("constant", (), 5),
        names[1]: kamino.Rule("constant", (), 7),
        names[2]: kamino.Rule("constant", (), 4),
        names[3]: kamino.Rule("constant", (), 8),
    }
    problem = kamino.problem_of(rules, lambda: 0.0)
    assert problem.asked == names[4]
    start = "Define One High in each School as a; so a = 5. Define Two High in each School as b; so b = 7. "
    more = "Define Three High in each School as c; so c = 4. Define Four High in each School as d; so d = 8. "
    end = "Define Five High in each School as e; so e = {} = 12."
    assert check_solution(problem, start + more + end.format("5 + 7")) == RIGHT
    assert check_solution(problem, start + more + end.format("7 + 5")) == RIGHT
    assert check_solution(problem, start + more + end.format("4 + 8")) == LENIENT
    assert check_solution(problem, start + more + end.format("5 * 7")) == LENIENT
    assert check_solution(problem, start + more + end.format("5 + 5 + 2")) == LENIENT


def test_a_letter_used_before_is_caught():
    """Random letters need no order, but each line needs a new one."""
    for problem in drawn("kamino, random letters", 6, 31):
        last = asked_line(problem)
        letters = [sentence.split(" as ")[1][0] for sentence in problem.solution]
        for at in range(1, last + 1):
            repeated = problem.solution[at].replace(
                f" as {letters[at]} ; so {letters[at]} ", f" as {letters[0]} ; so {letters[0]} "
            )
            assert repeated != problem.solution[at]
            text = "\n".join([*problem.solution[:at], repeated, *problem.solution[at + 1 :]])
            assert check_solution(problem, text) == LENIENT


def test_subtraction_has_an_order():
    names = [f"{item} in each School" for item in ("One High", "Two High", "Three High", "Four High")]
    rules = {
        names[3]: kamino.Rule("-", (names[0], names[1], names[2]), None),
        **{name: kamino.Rule("constant", (), number) for name, number in zip(names, (9, 4, 3), strict=False)},
    }
    problem = kamino.problem_of(rules, lambda: 0.0)
    start = " ".join(problem.solution[:3])
    end = " Define Four High in each School as d; so d = {} = 2."
    assert check_solution(problem, start + end.format("9 - (4 + 3)")) == RIGHT
    assert check_solution(problem, start + end.format("9 - (3 + 4)")) == RIGHT
    assert check_solution(problem, start + end.format("4 - (9 + 3)")) == LENIENT
    assert check_solution(problem, start + end.format("9 - 4 + 3")) == LENIENT


def test_igsm_steps_may_be_split_otherwise():
    """3 (a - b) may be 3 a - 3 b, but not 3 a - b, and not with numbers that the letters do not have."""
    definitions = {
        "H 's A": Instance((), number=9),
        "H 's B": Instance((), number=4),
        "H 's C": Instance(("H 's A", "H 's B"), minus=True, number=3, times=True),
    }
    values = {"H 's A": 9, "H 's B": 4, "H 's C": 15}
    problem = Problem((), "", (), (), "H 's C", values, definitions, "")
    start = "Define H's A as p; so p = 9. Define H's B as q; so q = 4. Define H's C as c; "
    assert check_solution(problem, start + "R = p - q = 9 - 4 = 5; so c = 3 * R = 3 * 5 = 15.") == RIGHT
    assert check_solution(problem, start + "R = p - q = 9 - 4 = 5; so c = R * 3 = 5 * 3 = 15.") == RIGHT
    split = "R = 3 * p = 3 * 9 = 4; S = 3 * q = 3 * 4 = 12; so c = R - S = 4 - 12 = 15."
    assert check_solution(problem, start + split) == RIGHT
    assert check_solution(problem, start + "R = q - p = 4 - 9 = 18; so c = 3 * R = 3 * 18 = 8.") == WRONG
    for wrong in (
        "so c = 15.",
        "R = p - q = 9 - 4 = 5; so c = 3 * R = 15.",
        "R = p - q = 9 - 4 = 5; so c = 3 * R = 3 * 5 = 14; so c = 15.",
        "R = p - q = 4 - 9 = 5; so c = 3 * R = 3 * 5 = 15.",
        "R = p - q = 9 - 4 = 5; so p = 3 * R = 3 * 5 = 15.",
        "p = p - q = 9 - 4 = 5; so c = 3 * p = 3 * 5 = 15.",
        "R = p + 19 = 9 + 19 = 5; so c = 3 * R = 3 * 5 = 15.",
        "so c = p - q * 3 = 15.",
        "so c = 3 * R = 3 * 5 = 15.",
    ):
        assert check_solution(problem, start + wrong) == LENIENT


@pytest.mark.parametrize(("modulus", "judged"), [(5, RIGHT), (7, LENIENT)])
def test_what_is_the_same_depends_on_the_modulus(modulus: int, judged: dict[str, bool]):
    """c = p is computed as 6 p, which is the same mod 5, and mod 7 only where p is 0, as here."""
    definitions = {
        "H 's A": Instance((), number=0, modulus=modulus),
        "H 's C": Instance(("H 's A",), modulus=modulus),
    }
    problem = Problem((), "", (), (), "H 's C", {"H 's A": 0, "H 's C": 0}, definitions, "")
    start = "Define H's A as p; so p = 0. Define H's C as c; "
    assert check_solution(problem, start + "so c = p = 0.") == RIGHT
    sums = "R = p + p = 0 + 0 = 0; S = R + R = 0 + 0 = 0; T = S + p = 0 + 0 = 0; so c = T + p = 0 + 0 = 0."
    assert check_solution(problem, start + sums) == judged


@pytest.mark.parametrize(
    "text", ["", ".", "\n", "Define", "Define as a; so a = 1.", "Define x as ; so = 1.", ";;;.", "= . = ;"]
)
def test_nonsense_is_wrong_and_no_error(text: str):
    for generator in ("kamino", "igsm"):
        assert check_solution(drawn(generator, 3, 1)[0], text) == WRONG
