"""Prompts and scores of benchmarks: worked by hand, for models whose answers are known, and on the real files."""

from __future__ import annotations

import bz2
import csv
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.commands.eval.benchmarks import BENCHMARKS, PAPER, prompts, select
from kvshift_lab.commands.eval.harness import CachedModel, evaluate_benchmark
from kvshift_lab.commands.eval.items import read_questions
from kvshift_lab.commands.eval.task_scores import scores

from .benchmark_cases import CMMLU, MMLU, SHARED, Scripted, needs_shared

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


def shown(folder: Path, name: str, room: int | None = None) -> list[dict[str, Any]]:
    benchmark = BENCHMARKS[name]
    fits = lambda prompt, answer: room is None or len(prompt + answer) <= room  # noqa: E731
    return list(prompts(benchmark, read_questions(benchmark.source, str(folder)), fits))


PROMPTS = {
    "lambada": (0, "to be or not to be, that is the", ["question"], 0),
    "winogrande": (
        0,
        "is too large.",
        ["The cup fits not into the bag as the cup", "The cup fits not into the bag as the bag"],
        0,
    ),
    "winogrande_letters": (
        0,
        "The cup fits not into the bag as the _ is too large.\nA. cup\nB. bag\nAnswer:",
        ["A", "B"],
        0,
    ),
    "hellaswag": (
        2,
        "Ski: A girl stands on snow. she",
        ["is the snow.", "cooks snow.", "skis down.", "is a ski and a girl."],
        2,
    ),
    "arc_easy": (
        0,
        "Question: Which way does it change?\nA. more\nB. less\nC. not at all\nAnswer: C\n\n"
        "Question: Which one is a plant?\nA. a dog\nB. an oak tree\nC. a very old stone\nD. air\nAnswer: B\n\n"
        "Question: Which one is a metal?\nA. wood\nB. water\nC. iron\nD. glass\nAnswer: C\n\n"
        "Question: Which one flies?\nA. a bird\nB. a fish\nC. a worm\nD. a tree\nAnswer: A\n\n"
        "Question: Which one swims?\nA. a cat\nB. a fish\nC. a stone\nD. a hill\nAnswer: B\n\n"
        "Question: Which one is warm?\nA. ice\nB. fire\nC. snow\nD. frost\nAnswer:",
        ["A", "B", "C", "D"],
        1,
    ),
    "arc_easy_text": (1, "Question: Which way does it change?\nAnswer:", ["more", "less", "not at all"], 2),
    "mmlu": (
        0,
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "What is 0 + 1?\nA. 0\nB. 1\nC. -1\nD. none\nAnswer: B\n\n"
        "What is 1 + 1?\nA. 1\nB. 2\nC. -1\nD. none\nAnswer: B\n\n"
        "What is 2 + 1?\nA. 2\nB. 3\nC. -1\nD. none\nAnswer: B\n\n"
        "What is 3 + 1?\nA. 3\nB. 4\nC. -1\nD. none\nAnswer: B\n\n"
        "What is 4 + 1?\nA. 4\nB. 5\nC. -1\nD. none\nAnswer: B\n\n"
        "What is 7 - 7?\nA. 0\nB. 7\nC. 14\nD. seventy-seven\nAnswer:",
        ["A", "B", "C", "D"],
        0,
    ),
    "mmlu_zero": (
        2,
        "The following are multiple choice questions (with answers) about anatomy.\n\n"
        "How many hands?\nA. one\nB. two\nC. three\nD. a dozen\nAnswer:",
        ["A", "B", "C", "D"],
        1,
    ),
    "mmlu_cloze": (2, "How many hands?\nAnswer:", ["one", "two", "three", "a dozen"], 1),
    "cmmlu_zero": (
        3,
        "以下是关于世界宗教的单项选择题，请直接给出正确答案的选项。\n\n"
        "题目：2号水是什么颜色？\nA. 红色的\nB. 蓝\nC. 无色\nD. 黑\n答案是：",
        ["A", "B", "C", "D"],
        1,
    ),
    "math": (
        0,
        "Problem:\nHalf of one?\n\nSolution: It is $\\boxed{\\frac{1}{2}}$.\n\nProblem:\nWhat is $1+1$?\n\nSolution:",
        ["One and one make $\\boxed{2}$.", "2"],
        0,
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_by_hand(name, mini):
    number, prompt, answers, gold = PROMPTS[name]
    found = shown(mini, name)[number]
    assert (found["prompt"], found["answers"], found["gold"]) == (prompt, answers, gold)
    assert found["whole"]


def test_examples_are_of_the_subject_in_their_order_behind_its_header(mini):
    prompt = shown(mini, "cmmlu")[1]["prompt"]
    assert prompt.startswith(
        "以下是关于世界宗教的单项选择题，请直接给出正确答案的选项。\n\n题目：0 加一等于多少？\nA. 0\n"
    )
    assert [prompt.index(f"题目：{n} 加一") for n in range(5)] == sorted(
        prompt.index(f"题目：{n} 加一") for n in range(5)
    )
    assert prompt.count("答案是：B\n\n") == 5


def test_what_is_too_long_loses_whole_examples_the_first_ones_first(mini):
    whole = shown(mini, "mmlu")[0]["prompt"]
    head, *examples = whole.split("\n\n")
    for kept in range(6):
        expected = "\n\n".join([head, *examples[5 - kept :]])
        for room in (len(expected) + 2, len(expected) + 2 + (kept < 5)):  # one more is too few for another example
            found = shown(mini, "mmlu", room)[0]
            assert (found["prompt"], found["shots"], found["whole"]) == (expected, kept, True)
    assert not shown(mini, "mmlu", len(head) + len(examples[-1]) + 3)[0]["whole"]


def test_a_question_is_no_example_for_itself(mini):
    for name in ("arc_easy", "arc_challenge", "math"):
        for record in shown(mini, name):
            question = record["prompt"].split("\n\n")[-1 if name != "math" else -2]
            assert record["prompt"].count(question.split("\n")[0] + "\n" + question.split("\n")[1]) == 1


def test_the_names_of_tasks():
    assert select(["paper"]) == list(PAPER)
    assert select(["mmlu", "table14", "lambada"]) == ["mmlu", "mmlu_cloze", "mmlu_zero", "lambada"]


# Models whose scores are known


def right(records: list[dict[str, Any]], name: str) -> Scripted:
    """Return a model that knows every answer, and writes a solution with it."""
    benchmark, known, solutions = BENCHMARKS[name], set(), {}
    for record in records:
        if benchmark.kind == "beginning":
            known.add((record["answers"][record["gold"]], f" {record['prompt']}"))
        else:
            known.add((record["prompt"], benchmark.delimiter + record["answers"][record["gold"]]))
        solutions[record["prompt"]] = record["answers"][-1]
    return Scripted(
        lambda context, continuation: 0.0 if (context, continuation) in known else -1.0,
        lambda context: f"Thus $\\boxed{{0}}$, no, \\boxed{{{solutions[context]}}}.",
    )


def first(records: list[dict[str, Any]], name: str) -> Scripted:
    """Return a model that always answers A, or the first choice."""
    firsts = {
        (record["answers"][0], f" {record['prompt']}")
        if BENCHMARKS[name].kind == "beginning"
        else (record["prompt"], BENCHMARKS[name].delimiter + record["answers"][0])
        for record in records
    }
    word = BENCHMARKS[name].kind == "word"
    return Scripted(
        lambda context, continuation: 0.0 if (context, continuation) in firsts and not word else -1.0,
        lambda context: "A, that is \\boxed{A}",
    )


def uniform(records: list[dict[str, Any]], name: str) -> Scripted:
    """Return a model for which all bytes are equally likely."""
    return Scripted(lambda context, continuation: -float(len(continuation.encode())), lambda context: "\\boxed{")


def score(folder: Path, name: str, model: Any, limit: int | None = None) -> dict[str, Any]:
    questions = read_questions(BENCHMARKS[name].source, str(folder))
    records = shown(folder, name)[:limit]
    found = evaluate_benchmark(CachedModel(model(records, name)), name, questions, limit)
    assert len(found) == len(records)
    return scores(name, found)


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


def expected(folder: Path, name: str, who: str, limit: int | None) -> float:
    """Return the score that the model must have."""
    source, kind = BENCHMARKS[name].source, BENCHMARKS[name].kind
    if kind == "solution" and who == "first":
        lines = (folder / "math" / "math_test.jsonl").read_text().splitlines()
        return sum(json.loads(line)["answer"] == "A" for line in lines) / len(lines)
    if kind in ("word", "solution"):
        return float(who == "right")
    items = list(plain_items(folder, source))[:limit]
    if who == "right":  # except where an earlier choice has the same text, and no letters distinguish them
        return sum(name in LETTERED or choices.index(choices[gold]) == gold for _, choices, gold in items) / len(items)
    guessed = []
    for _, choices, gold in items:
        lengths = [len(choice.encode()) for choice in choices]
        if who == "first" or kind == "beginning" or name in LETTERED:
            guess = 0  # all choices are equally likely: lm-eval takes the first
        elif BENCHMARKS[name].metric == "acc_norm":  # log-likelihood per character; each choice is preceded by a space
            rates = [-(1 + size) / len(choice) for size, choice in zip(lengths, choices, strict=True)]
            guess = rates.index(max(rates))
        else:
            guess = lengths.index(min(lengths))
        guessed.append(guess == gold)
    return sum(guessed) / len(guessed)


LETTERED = {"winogrande_letters", "arc_easy", "arc_challenge", "cmmlu", "cmmlu_zero", "mmlu", "mmlu_zero"}
WHO = {"right": right, "first": first, "uniform": uniform}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_model_whose_answers_are_known_has_the_score_it_must(name, who, mini):
    found = score(mini, name, WHO[who])
    assert found["score"] == pytest.approx(expected(mini, name, who, None), rel=1e-12)
    if who != "uniform":  # one answer is certain, whatever lengths divide the likelihoods
        for metric in set(found) & {"acc", "acc_norm", "acc_bytes"}:
            assert found[metric] == found["score"]
    assert found["items"] == len(read_questions(BENCHMARKS[name].source, str(mini)).tests)


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
        assert found["score"] == pytest.approx(expected(SHARED, name, who, None), rel=1e-12)
        assert found["items"] == PUBLISHED[BENCHMARKS[name].source]


@pytest.mark.shared
@needs_shared
@pytest.mark.parametrize("name", PUBLISHED)
def test_there_are_as_many_questions_as_published(name):
    questions = read_questions(name, str(SHARED))
    assert len(questions.tests) == PUBLISHED[name]
    assert len(questions.examples) == {"mmlu": 57 * 5, "cmmlu": 67 * 5}.get(name, 0)
    assert len({item.subject for item in questions.tests}) == {"mmlu": 57, "cmmlu": 67, "math": 7}.get(name, 1)
    if name in ("lambada", "math"):
        return
    for item, (question, choices, gold) in zip(questions.tests, plain_items(SHARED, name), strict=True):
        assert question.removeprefix("Question: ") == item.question
        assert (tuple(choices), gold) == (item.answers, item.gold)


@pytest.mark.shared
@needs_shared
def test_every_subject_of_cmmlu_has_its_chinese_name():
    benchmark = BENCHMARKS["cmmlu"]
    heads = {benchmark.header(item.subject) for item in read_questions("cmmlu", str(SHARED)).tests}
    assert len(heads) == 67
    pattern = re.compile(r"以下是关于[\u4e00-\u9fff]+的单项选择题，请直接给出正确答案的选项。\n\n")
    assert all(pattern.fullmatch(head) for head in heads)


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
def test_the_last_box_counts(written, correct, mini):
    model = Scripted(lambda *_: 0.0, lambda prompt: written if "Problem:\nHalf of one?" in prompt[-50:] else "")
    found = evaluate_benchmark(CachedModel(model), "math", read_questions("math", str(mini)))
    assert [item["exact_match"] for item in found] == [0, correct, 0]
