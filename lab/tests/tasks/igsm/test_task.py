"""Sequences and questions: where they are cut, that they never share a problem, and that the checker judges them."""

from __future__ import annotations

import random
import re
import string
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift_lab.core.errors import LabError
from kvshift_lab.tasks.igsm import IGSMConfig, IGSMTask, kamino
from kvshift_lab.tasks.igsm import task as igsm_task
from kvshift_lab.tasks.igsm.problem import bucket_of
from kvshift_lab.tasks.igsm.wording import VOCABULARY
from kvshift_lab.tasks.questions import QuestionTask

from ..cases import check_shape, seeded

SMALL: dict[str, Any] = {"ops": 4, "test_ops": 5, "length": 211}
TASKS: dict[str, Any] = {
    "kamino": SMALL,
    "question first": {**SMALL, "order": "qp"},
    "markers": {**SMALL, "markers": True},
    "solutions": {**SMALL, "loss": "solutions"},
    "igsm": {**SMALL, "generator": "igsm", "length": 307},
    "random letters": {**SMALL, "letters": "random", "modulus": 5},
    "igsm, modulus": {**SMALL, "generator": "igsm", "length": 307, "modulus": 7},
    "as printed": {**SMALL, "as_printed": True, "max_operations": 9, "test_ops": 6, "length": 401},
}


def words(ids: Tensor) -> list[str]:
    return [VOCABULARY[at] for at in ids.tolist()]


def whole(ids: list[int]) -> list[list[int]]:
    """Return the problems that end in a sequence, without their end tokens."""
    found: list[list[int]] = [[]]
    for token in ids:
        if token == 0:
            found.append([])
        else:
            found[-1].append(token)
    return found[:-1]


@pytest.mark.parametrize("name", TASKS)
def test_sequences_are_problems_end_to_end(name: str):
    task = IGSMTask(IGSMConfig(**TASKS[name]))
    batch = task.batch(seeded(0), 13)
    check_shape(task, batch, 13)
    for row, labels, slices in zip(batch.input_ids, batch.labels, batch.slices, strict=True):
        in_solution, seen = False, 0
        for column, word in enumerate(words(row)):
            starts = word == "Define" and not in_solution
            in_solution |= starts
            assert in_solution == (int(slices[column]) >= 0)
            if in_solution or (task.config.loss == "all" and column):
                assert labels[column] == row[column]
            else:
                assert labels[column] == -100
            if word == "<end>":
                in_solution, seen = False, seen + 1
        assert seen >= 1  # each sequence begins with a whole problem
        first = words(row)[0]
        expected = {"question first": "How", "markers": "<problem>"}.get(name, "The")
        assert first == expected
        ends = (row == task.end_token).nonzero().flatten()[:-1]
        assert all(VOCABULARY[row[int(at) + 1]] == expected for at in ends)


@pytest.mark.parametrize("name", TASKS)
def test_values_are_labelled_so(name: str):
    task = IGSMTask(IGSMConfig(**TASKS[name]))
    batch = task.batch(seeded(1), 31)
    for row, slices in zip(batch.input_ids, batch.slices, strict=True):
        text = words(row)
        for column, at in enumerate(slices.tolist()):
            if at == 1:
                assert text[column].isdigit()
                assert text[column - 1] == "="
                assert {"+", "-", "*"} & set(text[column - 12 : column])
    values = batch.labels[batch.slices == 1]
    assert len(values) > 31
    guess = values.bincount().max() / len(values)
    assert int(values.max()) - VOCABULARY.index("0") == task.config.modulus - 1
    assert task.chance == {"values": 1 / task.config.modulus}
    assert guess < task.chance["values"] + 0.117  # the most frequent of few values, often 0 from products


@pytest.mark.parametrize("name", TASKS)
def test_questions_are_of_exactly_so_many_operations_and_begin_sequences_of_training(name: str):
    task = IGSMTask(IGSMConfig(**TASKS[name]))
    assert isinstance(task, QuestionTask)
    questions = task.questions(seeded(2), 7)
    again = task.questions(seeded(2), 7)
    for question, same in zip(questions, again, strict=True):
        assert torch.equal(question.prompt, same.prompt)
        if task.config.generator == "kamino":
            assert len(question.truth.solution) == task.config.test_ops
        (encoded,) = task.encoder.encode([question.truth])
        assert question.prompt.tolist() == encoded.prompt
        assert question.prompt.dtype == torch.int64
        answer = torch.tensor(encoded.solution[:-1])
        assert task.judge(question, answer) == {"paper": True, "strict": True}
        assert task.judge(question, answer[:-2]) == {"paper": False, "strict": False} or len(answer) > 40
        assert task.judge(question, answer[:0]) == {"paper": False, "strict": False}


@pytest.mark.parametrize(
    "options", [{}, {"generator": "igsm"}, {"letters": "random", "modulus": 5}, {"generator": "igsm", "modulus": 5}]
)
def test_training_and_questions_never_meet(options: dict[str, Any]):
    """With few operations, problems would coincide; keys fall into 16 and 7 of 23 buckets, whatever the modulus."""
    config: dict[str, Any] = {"ops": 5, "test_ops": 5, **options}
    task = IGSMTask(IGSMConfig(**config))
    uniform = random.Random(3).random
    trained = [task.draw(uniform, training=True) for _ in range(400)]
    asked = [task.draw(uniform, training=False) for _ in range(200)]
    assert not {problem.key for problem in trained} & {problem.key for problem in asked}
    assert {bucket_of(problem.key) for problem in trained} <= set(range(16))
    assert {bucket_of(problem.key) for problem in asked} <= set(range(16, 23))


def test_share_of_problems_kept_from_training():
    """The 23 buckets are equally likely, and seven of them are kept from training."""
    counts = [0] * 23
    uniform = random.Random(4).random
    task = IGSMTask(IGSMConfig())
    for _ in range(4600):
        problem = task._of_ops(uniform, 3)
        assert problem is not None
        counts[bucket_of(problem.key)] += 1
    statistic = sum((count - 200) ** 2 / 200 for count in counts)
    assert statistic < 48.3  # chi-squared, 22 degrees of freedom: one in a thousand


def test_the_order_of_statements_tells_nothing():
    """For the split, statements in another order, or with another question, are the same problem."""
    task = IGSMTask(IGSMConfig())
    problem = task._of_ops(random.Random(5).random, 6)
    assert problem is not None
    assert problem.key == "\n".join(sorted(problem.statements))


@pytest.mark.parametrize(("law", "generator", "smaller"), [
    ("of_the_generator", "kamino", False),
    ("of_the_generator", "igsm", True),
    ("uniform", "igsm", False),
    ("smaller_of_two", "kamino", True),
])  # fmt: skip
def test_operations_in_training(law: Any, generator: Any, smaller: bool):
    task = IGSMTask(IGSMConfig(ops=12, ops_law=law, generator=generator))
    uniform = random.Random(6).random
    ops = torch.tensor([task._ops(uniform) for _ in range(6000)])
    chances = torch.tensor([(2 * (12 - k) + 1) / 144 if smaller else 1 / 12 for k in range(1, 13)], dtype=torch.float64)
    counts = ops.bincount(minlength=13)[1:]
    statistic = ((counts - 6000 * chances) ** 2 / (6000 * chances)).sum()
    assert statistic < 31.3  # chi-squared, 11 degrees of freedom: one in a thousand


def test_kamino_sequences_have_the_operations_asked_for():
    task = IGSMTask(IGSMConfig(ops=3, test_ops=5, length=307))
    counts = set()
    for row in task.batch(seeded(7), 29).input_ids.tolist():
        counts |= {problem.count(VOCABULARY.index("Define")) for problem in whole(row)}
    assert counts == {1, 2, 3}


@pytest.mark.parametrize(("letters", "seen"), [("in_order", "abc"), ("random", string.ascii_letters)])
def test_letters_that_training_has(letters: Any, seen: str):
    task = IGSMTask(IGSMConfig(ops=3, test_ops=5, length=307, letters=letters))
    uniform = random.Random(8).random
    problems = [task.draw(uniform, training=True) for _ in range(300)]
    found = {sentence.split(" as ")[1][0] for problem in problems for sentence in problem.solution}
    assert found == set(seen)


def test_problems_that_are_too_long_are_left_out():
    """Hardly any problem of three operations is short enough, while problems of one and two are."""
    config = IGSMConfig(ops=3, test_ops=5, length=83)
    rows = IGSMTask(config).batch(seeded(8), 53).input_ids.tolist()
    assert {problem.count(VOCABULARY.index("Define")) for row in rows for problem in whole(row)} == {1, 2}
    assert all(0 in row for row in rows)


def test_a_sequence_that_holds_no_problem_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(igsm_task, "_TRIES", 50)
    with pytest.raises(LabError, match=r"igsm.length must hold a problem and its solution, got 20: 50 problems"):
        IGSMTask(IGSMConfig(length=20)).batch(seeded(9), 1)


def test_operations_that_do_not_occur_are_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(igsm_task, "_TRIES", 50)
    with pytest.raises(LabError, match=r"igsm.test_ops: none of 50 problems drawn has 52 operations and is kept from"):
        IGSMTask(IGSMConfig(generator="igsm", test_ops=52, max_edges=4)).questions(seeded(10), 1)
    with pytest.raises(LabError, match=r"igsm.ops: none of 50 problems drawn has 1 operations and is for training"):
        IGSMTask(IGSMConfig(generator="igsm", ops=1)).batch(seeded(10), 1)
    with pytest.raises(LabError, match=r"igsm.test_ops: none of 50 problems drawn has 13 operations"):
        IGSMTask(IGSMConfig(as_printed=True, test_ops=13)).questions(seeded(10), 1)


def test_the_sequence_that_the_docstring_draws():
    gel, trail = "Gel Pen in each Stationery", "Trail Pack in each Backpack"
    rules = {gel: kamino.Rule("+", (trail,), 6), trail: kamino.Rule("constant", (), 9)}
    task = IGSMTask(IGSMConfig())
    (encoded,) = task.encoder.encode([kamino.problem_of(rules, lambda: 0.0)])
    ids = encoded.prompt + encoded.solution
    marks = ["."] * len(encoded.prompt) + ["s"] * len(encoded.solution)
    for at in encoded.values:
        marks[len(encoded.prompt) + at] = "v"
    row = ["|" if word == "\n" else word for word in words(torch.tensor(ids))]
    for name, expected in (("input_ids", row), ("slices", marks)):
        lines = re.findall(rf"^    {name}  (.*?)(?: {{6}}v values.*)?$", igsm_task.__doc__ or "", re.MULTILINE)
        assert " ".join(lines).split() == expected
