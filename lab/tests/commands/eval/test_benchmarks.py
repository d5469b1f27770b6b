"""Prompts and scores of benchmarks: worked by hand, for models whose answers are known, and on the real files."""

from __future__ import annotations

import bz2
import csv
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.evaluator import evaluate as run_tasks

from kvshift_lab.commands.eval.benchmarks import (
    PAPER,
    TASKS,
    average,
    compare,
    compare_averages,
    load_tasks,
    scores,
    select,
)
from kvshift_lab.commands.eval.questions import judge_math

from .benchmark_cases import CMMLU, MMLU, SHARED, Scripted, needs_shared

BENCHMARKS = [path.stem for path in sorted(TASKS.glob("*.yaml"))]

# The published numbers of questions; for CMMLU, that of its repository (its paper says 11,528).
PUBLISHED = {
    "lambada": 5153,
    "winogrande": 1267,
    "hellaswag": 10042,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "cmmlu": 11582,
    "mmlu": 14042,
    "math": 5000,
}


@cache
def load(folder: Path, name: str) -> Any:
    return load_tasks([name], str(folder))[name]


def requests(task: Any, doc: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return what lm-eval would ask a model: (context, continuation) of each choice, or (context, options)."""
    found = task.construct_requests(doc, task.fewshot_context(doc, task.config.num_fewshot or 0))
    return [each.args for each in (found if isinstance(found, list) else [found])]


def source_of(name: str) -> str:
    return next(source for source in sorted(PUBLISHED, key=len, reverse=True) if name.startswith(source))


PROMPTS = {
    "lambada": (0, "to be or not to be, that is the", [" question"]),
    "hellaswag": (
        2,
        "Ski: A girl stands on snow. she",
        [" is the snow.", " cooks snow.", " skis down.", " is a ski and a girl."],
    ),
    "arc_easy": (
        0,
        "Question: Which way does it change?\nA. more\nB. less\nC. not at all\nAnswer: C\n\n"
        "Question: Which one is a plant?\nA. a dog\nB. an oak tree\nC. a very old stone\nD. air\nAnswer: B\n\n"
        "Question: Which one is a metal?\nA. wood\nB. water\nC. iron\nD. glass\nAnswer: C\n\n"
        "Question: Which one flies?\nA. a bird\nB. a fish\nC. a worm\nD. a tree\nAnswer: A\n\n"
        "Question: Which one swims?\nA. a cat\nB. a fish\nC. a stone\nD. a hill\nAnswer: B\n\n"
        "Question: Which one is warm?\nA. ice\nB. fire\nC. snow\nD. frost\nAnswer:",
        [" A", " B", " C", " D"],
    ),
    "arc_easy_text": (1, "Question: Which way does it change?\nAnswer:", [" more", " less", " not at all"]),
    "mmlu": (
        0,
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "What is 0 + 1?\nA. 0\nB. 1\nC. -1\nD. none\nAnswer: B\n\n"
        "What is 1 + 1?\nA. 1\nB. 2\nC. -1\nD. none\nAnswer: B\n\n"
        "What is 2 + 1?\nA. 2\nB. 3\nC. -1\nD. none\nAnswer: B\n\n"
        "What is 3 + 1?\nA. 3\nB. 4\nC. -1\nD. none\nAnswer: B\n\n"
        "What is 4 + 1?\nA. 4\nB. 5\nC. -1\nD. none\nAnswer: B\n\n"
        "What is 7 - 7?\nA. 0\nB. 7\nC. 14\nD. seventy-seven\nAnswer:",
        [" A", " B", " C", " D"],
    ),
    "mmlu_zero": (
        2,
        "The following are multiple choice questions (with answers) about anatomy.\n\n"
        "How many hands?\nA. one\nB. two\nC. three\nD. a dozen\nAnswer:",
        [" A", " B", " C", " D"],
    ),
    "mmlu_cloze": (2, "How many hands?\nAnswer:", [" one", " two", " three", " a dozen"]),
    "cmmlu_zero": (
        3,
        "以下是关于世界宗教的单项选择题，请直接给出正确答案的选项。\n\n"
        "题目：2号水是什么颜色？\nA. 红色的\nB. 蓝\nC. 无色\nD. 黑\n答案是：",
        ["A", "B", "C", "D"],
    ),
    "math": (
        0,
        "Problem:\nHalf of one?\n\nSolution: It is $\\boxed{\\frac{1}{2}}$.\n\nProblem:\nWhat is $1+1$?\n\nSolution:",
        [{"until": ["Problem:"], "do_sample": False, "max_gen_toks": 512}],
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_by_hand(name, mini):
    number, prompt, continuations = PROMPTS[name]
    task = load(mini, name)
    assert requests(task, task.eval_docs[number]) == [(prompt, continuation) for continuation in continuations]


def test_both_beginnings_of_a_sentence_have_the_same_end(mini):
    task = load(mini, "winogrande")
    assert requests(task, task.eval_docs[0]) == [
        ("The cup fits not into the bag as the cup", " is too large."),
        ("The cup fits not into the bag as the bag", " is too large."),
    ]


def test_examples_are_of_the_subject_in_their_order_behind_its_header(mini):
    task = load(mini, "cmmlu")
    prompt = requests(task, task.eval_docs[1])[0][0]
    assert prompt.startswith(
        "以下是关于世界宗教的单项选择题，请直接给出正确答案的选项。\n\n题目：0 加一等于多少？\nA. 0\n"
    )
    places = [prompt.index(f"题目：{n} 加一") for n in range(5)]
    assert places == sorted(places)
    assert prompt.count("答案是：B\n\n") == 5


def test_a_question_is_no_example_for_itself(mini):
    for name in ("arc_easy", "arc_challenge", "math"):
        task = load(mini, name)
        for doc in task.eval_docs:
            prompt = requests(task, doc)[0][0]
            assert prompt.count(doc["context"] if name == "math" else doc["question"]) == 1


def test_the_names_of_tasks():
    assert select(["paper"]) == list(PAPER)
    assert select(["mmlu", "table14", "lambada"]) == ["mmlu", "mmlu_cloze", "mmlu_zero", "lambada"]


# Models whose scores are known


def right(task: Any) -> Scripted:
    """Return a model that knows every answer, and writes a solution with it."""
    known, solutions = set(), {}
    for doc in task.eval_docs:
        asked = requests(task, doc)
        if task.OUTPUT_TYPE == "generate_until":
            solutions[asked[0][0]] = doc["answer"]
        else:
            known.add(asked[doc.get("gold", 0)])
    return Scripted(
        lambda context, continuation: 0.0 if (context, continuation) in known else -1.0,
        lambda context: f"Thus $\\boxed{{0}}$, no, \\boxed{{{solutions[context]}}}.",
    )


def first(task: Any) -> Scripted:
    """Return a model that always answers A, or the first choice."""
    choice = task.OUTPUT_TYPE == "multiple_choice"
    firsts = {requests(task, doc)[0] for doc in task.eval_docs} if choice else set()
    return Scripted(
        lambda context, continuation: 0.0 if (context, continuation) in firsts else -1.0,
        lambda context: "A, that is \\boxed{A}",
    )


def uniform(task: Any) -> Scripted:
    """Return a model for which all bytes are equally likely."""
    return Scripted(lambda context, continuation: -float(len(continuation.encode())), lambda context: "\\boxed{")


def score(folder: Path, name: str, model: Any) -> dict[str, Any]:
    task = load(folder, name)
    return scores(task, run_tasks(model(task), {"tasks": {name: task}}, bootstrap_iters=0)["samples"][name])


def plain_items(folder: Path, name: str) -> Iterator[tuple[str, list[str], int]]:
    """Yield question, choices and gold, read from the files without using the package."""
    if name == "hellaswag":
        with bz2.open(folder / "hellaswag" / "hellaswag_val_full.txt.bz2", "rt", encoding="utf-8") as file:
            while question := file.readline():
                gold = int(file.readline())
                yield question[:-1], [file.readline()[:-1] for _ in range(4)], gold
    elif name.startswith("arc"):
        for line in (folder / "arc" / f"{name}_test.jsonl").read_text().splitlines():
            row = json.loads(line)
            choices: list[str] = []
            for choice in row["choices"]:
                if choice not in choices:
                    choices.append(choice)
            yield row["query"], choices, choices.index(row["choices"][row["gold"]])
    elif name == "winogrande":
        for line in (folder / "winogrande" / "winogrande_xl_dev.jsonl").read_text().splitlines():
            row = json.loads(line)
            yield row["continuation"], row["context_options"], row["gold"]
    else:
        for path in sorted((folder / name / "test").glob("*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                for row in list(csv.reader(file))[1:]:
                    gold = int(row[5]) if name == "mmlu" else "ABCD".index(row[6])
                    yield (row[0], row[1:5], gold) if name == "mmlu" else (row[1], row[2:6], gold)


def expected(folder: Path, name: str, who: str) -> float:
    """Return the score that the model must have."""
    source = source_of(name)
    if name == "math" and who == "first":
        lines = (folder / "math" / "math_test.jsonl").read_text().splitlines()
        return sum(json.loads(line)["answer"] == "A" for line in lines) / len(lines)
    if name in ("lambada", "math"):
        return float(who == "right")
    items = list(plain_items(folder, source))
    if who == "right":  # except where an earlier choice has the same text, and no letters distinguish them
        return sum(name in LETTERED or choices.index(choices[gold]) == gold for _, choices, gold in items) / len(items)
    guessed = []
    for _, choices, gold in items:
        lengths = [len(choice.encode()) for choice in choices]
        if who == "first" or name == "winogrande" or name in LETTERED:
            guess = 0  # all choices are equally likely: lm-eval takes the first
        elif name == "mmlu_cloze":  # log-likelihood per character; each choice is preceded by a space
            rates = [-(1 + size) / len(choice) for size, choice in zip(lengths, choices, strict=True)]
            guess = rates.index(max(rates))
        else:
            guess = lengths.index(min(lengths))
        guessed.append(guess == gold)
    return sum(guessed) / len(guessed)


LETTERED = {"arc_easy", "arc_challenge", "cmmlu", "cmmlu_zero", "mmlu", "mmlu_zero"}
WHO = {"right": right, "first": first, "uniform": uniform}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_model_whose_answers_are_known_has_the_score_it_must(name, who, mini):
    found = score(mini, name, WHO[who])
    assert found["score"] == pytest.approx(expected(mini, name, who), rel=1e-12)
    if who != "uniform":  # one answer is certain, whatever lengths divide the likelihoods
        for metric in set(found) & {"acc", "acc_norm", "acc_bytes"}:
            assert found[metric] == found["score"]
    assert found["items"] == len(load(mini, name).eval_docs)


@pytest.mark.parametrize("who", WHO)
def test_the_perplexity_of_words(who, mini):
    lines = (mini / "lambada" / "lambada_openai.jsonl").read_text().splitlines()
    words = [json.loads(line)["continuation"] for line in lines]
    nats = {"right": 0.0, "first": 1.0, "uniform": sum(len(f" {word}") for word in words) / len(words)}
    assert score(mini, "lambada", WHO[who])["perplexity"] == pytest.approx(math.exp(nats[who]), rel=1e-12)


@pytest.mark.parametrize("name", ["mmlu", "mmlu_zero", "cmmlu", "cmmlu_zero"])
def test_the_mean_over_subjects(name, mini):
    """For a model that always answers A, each subject has the same weight, however many questions it has."""
    rights: dict[str, list[bool]] = {}
    for subject, splits in (MMLU if name.startswith("mmlu") else CMMLU).items():
        rights[subject] = [gold == 0 for _, _, gold in splits["test"]]
    expected = sum(sum(each) / len(each) for each in rights.values()) / len(rights)
    assert score(mini, name, first)["macro"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.shared
@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_same_on_every_question_there_is(name):
    for who, model in WHO.items():
        found = score(SHARED, name, model)
        assert found["score"] == pytest.approx(expected(SHARED, name, who), rel=1e-12)
        assert found["items"] == PUBLISHED[source_of(name)]


@pytest.mark.shared
@needs_shared
@pytest.mark.parametrize("name", PUBLISHED)
def test_there_are_as_many_questions_as_published(name):
    questions = load(SHARED, name).eval_docs
    assert len(questions) == PUBLISHED[name]
    subjects = set(questions["subject"]) if "subject" in questions.features else {""}
    assert len(subjects) == {"mmlu": 57, "cmmlu": 67, "math": 7}.get(name, 1)
    if name == "cmmlu":
        assert all(re.fullmatch(r"[\u4e00-\u9fff]+", subject) for subject in subjects)
    if name in ("lambada", "winogrande", "math"):
        return
    for row, (question, choices, gold) in zip(questions, plain_items(SHARED, name), strict=True):
        assert question.removeprefix("Question: ") == row["question"]
        assert (choices, gold) == (row["choices"], row["gold"])


# Answers to MATH problems


@pytest.mark.parametrize(
    ("written", "correct"),
    [
        ("so it is $\\boxed{\\frac{1}{2}}$.", True),
        ("\\boxed{\\frac12}", True),  # lm-eval normalizes both to the same form
        ("\\boxed{0.5}", True),
        ("first \\boxed{3}, then \\boxed{\\frac{1}{2}}", True),
        ("first \\boxed{\\frac{1}{2}}, then \\boxed{3}", False),
        ("\\frac{1}{2}", False),
        ("", False),
        ("\\boxed{\\frac{1}{2}", False),
        ("\\boxed{}", False),
        ("\\boxed \\frac{1}{2}", True),
    ],
)
def test_the_last_box_counts(written, correct):
    assert judge_math({"answer": "\\frac{1}{2}"}, [written]) == {"exact_match": correct}


# Scores and comparisons


def test_mcnemar_and_the_bootstrap_over_pairs():
    random = np.random.default_rng(1)
    ours, theirs = (random.random(211) < 0.6).astype(float), (random.random(211) < 0.5).astype(float)
    found = compare(ours, theirs)
    b, c = int(sum(ours > theirs)), int(sum(ours < theirs))
    assert (found["only_first"], found["only_second"]) == (b, c)
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c)
    assert found["p"] == pytest.approx(min(1.0, 2 * tail), rel=1e-9)
    assert found["difference"] == pytest.approx(ours.mean() - theirs.mean(), rel=1e-12)
    drawn = [(ours - theirs)[random.integers(0, 211, 211)].mean() for _ in range(20_000)]  # bootstrap over questions
    for end, quantile in (("low", 0.025), ("high", 0.975)):
        assert found[end] == pytest.approx(np.quantile(drawn, quantile), abs=1.5 / 211)


def test_models_that_do_not_differ():
    same = compare(np.array([1.0, 0.0, 1.0]), np.array([1.0, 0.0, 1.0]))
    assert same == {"difference": 0, "low": 0, "high": 0, "only_first": 0, "only_second": 0, "p": 1}


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """The pairs have a known difference; coverage of 95 % means 90 to 99 % of 400 intervals."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        theirs = random.random(300) < 0.4
        ours = np.where(random.random(300) < 0.25, random.random(300) < 0.6, theirs)  # 0.25 * (0.6 - 0.4) = 0.05 better
        found = compare(ours.astype(float), theirs.astype(float))
        held += found["low"] <= 0.05 <= found["high"]
    assert 0.90 <= held / 400 <= 0.99


def test_averages_are_of_the_eight():
    random = np.random.default_rng(2)
    sides = [{name: (random.random(50) < p).astype(float) for name in PAPER} for p in (0.7, 0.4)]
    found = compare_averages({name: [side[name] for side in sides] for name in PAPER})
    assert found is not None
    assert found["difference"] == pytest.approx(np.mean([sides[0][n].mean() - sides[1][n].mean() for n in PAPER]))
    errors = [np.std(sides[0][name] - sides[1][name], ddof=1) / math.sqrt(50) for name in PAPER]
    half = 1.96 * math.hypot(*errors) / 8
    assert found["high"] - found["low"] == pytest.approx(2 * half, rel=0.1)
    assert compare_averages({}) is None
    assert average({"mmlu": {"score": 1.0, "stderr": 0.0}}) is None
