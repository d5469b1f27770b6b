"""Whether a solution is right: by the paper's rule, and strictly."""

from __future__ import annotations

from kvshift.lab.tasks.igsm.problem import Known, Problem, Step
from kvshift.lab.tasks.igsm.wording import spaced


def is_right(problem: Problem, text: str) -> dict[str, bool]:
    """Judge a text, written or spaced.

    paper   some step defines what is asked and ends in the right value, whatever stands before or after (the paper's
            Appendix E.2)
    strict  and every step up to the first such one is right: it defines a quantity of the problem for the first time,
            by a new letter; what it depends on was defined; it computes it as the problem says, and without an error

    What a solution says after that counts in neither.
    """
    found = steps(text)
    answered = next((at for at, step in enumerate(found) if step is not None and _answers(step, problem)), None)
    if answered is None:
        return {"paper": False, "strict": False}
    known = Known({}, {})
    return {"paper": True, "strict": all(_follows(step, problem, known) for step in found[: answered + 1])}


def steps(text: str) -> list[Step | None]:
    """The sentences of a solution; None for one that is no step. A last one without a full stop is left out."""
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
    """Whether a step is right after those before it; if so it is known from here on."""
    if step is None or step.name in known.values:
        return False
    definition = problem.definitions.get(step.name)
    if definition is None or not all(name in known.values for name in definition.dependencies):
        return False
    letters = [" ".join(equation[0]) for equation in step.equations]
    if letters[-1] != step.letter or len({*letters, *known.letters}) != len(letters) + len(known.letters):
        return False
    if not definition.agrees(step, known):
        return False
    for letter in letters:
        known.letters[letter] = None
    known.letters[step.letter] = step.name
    known.values[step.name] = problem.values[step.name]
    return True
