"""Check whether a solution is right, by the paper's rule and by a stricter one."""

from __future__ import annotations

from kvshift_lab.tasks.igsm.problem import Known, Problem, Step
from kvshift_lab.tasks.igsm.wording import spaced


def check_solution(problem: Problem, text: str) -> dict[str, bool]:
    """Judge the text of a solution, detokenized or spaced, by two measures.

    paper   a step defines the quantity that the question asks for and ends in the right value, regardless of all other
            steps (the paper's Appendix E.2)
    strict  in addition, every step up to the first such step is right: it defines a quantity of the problem for the
            first time, by a new letter, after its dependencies, and computes it correctly as the problem states

    The text after that step counts in neither measure.
    """
    found = steps(text)
    answered = next((at for at, step in enumerate(found) if step is not None and _answers(step, problem)), None)
    if answered is None:
        return {"paper": False, "strict": False}
    known = Known({}, {})
    return {"paper": True, "strict": all(_follows(step, problem, known) for step in found[: answered + 1])}


def steps(text: str) -> list[Step | None]:
    """Return the steps of a solution, with None for sentences that are not steps.

    A last sentence without a full stop is ignored.
    """
    *sentences, _ = spaced(text).replace(" \n ", " ").removeprefix("\n ").split(".")
    return [_step(sentence.strip()) for sentence in sentences]


def _step(sentence: str) -> Step | None:
    head, *equations = (part.strip() for part in sentence.split(";"))
    if not head.startswith("Define ") or not equations or not equations[-1].startswith("so "):
        return None
    name, _, letter = head.removeprefix("Define ").rpartition(" as ")
    equations[-1] = equations[-1].removeprefix("so ")
    if not name or len(letter) != 1 or not letter.isalpha():
        return None
    sides = tuple(tuple(tuple(side.split()) for side in equation.split("=")) for equation in equations)
    return Step(name, letter, sides)


def _answers(step: Step, problem: Problem) -> bool:
    return step.name == problem.asked and step.result == str(problem.answer)


def _follows(step: Step | None, problem: Problem, known: Known) -> bool:
    """Return True if a step is right, given the previous steps in `known`; if so, add it to `known`."""
    if step is None or step.name in known.values:
        return False
    definition = problem.definitions.get(step.name)
    if definition is None or not all(name in known.values for name in definition.dependencies):
        return False
    letters = [" ".join(equation[0]) for equation in step.equations]
    if letters[-1] != step.letter or len({*letters, *known.letters}) != len(letters) + len(known.letters):
        return False
    if not definition.is_correct_step(step, known):
        return False
    for letter in letters:
        known.letters[letter] = None
    known.letters[step.letter] = step.name
    known.values[step.name] = problem.values[step.name]
    return True
