"""The questions of the benchmarks, read from the files of a folder or from the hub.

DIR/lambada/lambada_openai.jsonl          context, continuation
DIR/winogrande/winogrande_xl_dev.jsonl    context_options, continuation, gold
DIR/hellaswag/hellaswag_val_full.txt.bz2  six lines per item: activity and context, label, four endings
DIR/arc/arc_{easy,challenge}_test.jsonl   query, choices, gold
DIR/mmlu/{test,dev}/SUBJECT_{test,dev}.csv  question, choice0 to choice3, answer
DIR/cmmlu/{test,dev}/SUBJECT.csv          Question, A to D, Answer
DIR/math/math_test.jsonl                  context, answer, chain_of_thought, category
"""

from __future__ import annotations

import bz2
import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.config import SHARED_DATA_ENV

HUB = "hub"

_SPLITS = {"test": "test", "examples": "dev"}  # folder names of MMLU and CMMLU


class Item(NamedTuple):
    """A question of a benchmark.

    Attributes:
        question: Text of the question. LAMBADA: the text before the last word. WinoGrande: the end of the sentence.
        answers: Answers to choose from. LAMBADA: only the last word. WinoGrande: the two beginnings of the sentence.
            MATH: the solution and the answer.
        gold: Index of the correct answer.
        subject: Subject of the question, for MMLU, CMMLU and MATH.
    """

    question: str
    answers: tuple[str, ...]
    gold: int = 0
    subject: str = ""


class Questions(NamedTuple):
    """The questions to score, and the separate questions to use as examples in prompts, if the data has any."""

    tests: list[Item]
    examples: list[Item]


def find_data(data: str | None) -> str:
    """Return the folder of the questions, or "hub".

    Args:
        data: A folder or "hub". None: the folder in the environment variable KVSHIFT_SHARED_DATA, otherwise the hub.

    Raises:
        LabError: The folder does not exist.
    """
    where = data or os.environ.get(SHARED_DATA_ENV) or HUB
    if where != HUB and not Path(where).is_dir():
        raise LabError(f"data must be a folder or {HUB}; there is no folder {where}")
    return where


def read_questions(benchmark: str, data: str) -> Questions:
    """Return the questions of a benchmark, in the order of their file.

    Args:
        benchmark: One of lambada, winogrande, hellaswag, arc_easy, arc_challenge, mmlu, cmmlu, math.
        data: A folder with the files that the module's docstring lists, or "hub".

    Raises:
        LabError: A file is missing or has another format, or the hub does not have the data.
    """
    local, hub = _SOURCES[benchmark]
    read: Callable[[str], Iterable[Item]] = hub if data == HUB else lambda part: local(Path(data), part)
    try:
        questions = Questions(list(read("test")), list(read("examples")))
    except Exception as error:  # may come from csv, json, bz2, datasets or the network
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise LabError(f"data: {benchmark} cannot be read from {data}: {type(error).__name__}: {reason}") from error
    if not questions.tests:
        raise LabError(f"data: {benchmark} has no questions in {data}")
    return questions


def _lambada(folder: Path, part: str) -> Iterator[Item]:
    for row in _lines(folder / "lambada" / "lambada_openai.jsonl", part):
        yield Item(row["context"], (row["continuation"],))


def _lambada_from_hub(part: str) -> Iterator[Item]:
    for row in _load("EleutherAI/lambada_openai", "default", part):
        context, _, word = row["text"].rpartition(" ")
        yield Item(context, (word,))


def _winogrande(folder: Path, part: str) -> Iterator[Item]:
    for row in _lines(folder / "winogrande" / "winogrande_xl_dev.jsonl", part):
        yield Item(row["continuation"], tuple(row["context_options"]), row["gold"])


def _winogrande_from_hub(part: str) -> Iterator[Item]:
    for row in _load("allenai/winogrande", "winogrande_xl", part, test="validation"):
        begin, _, end = row["sentence"].partition("_")
        yield Item(end.strip(), (begin + row["option1"], begin + row["option2"]), int(row["answer"]) - 1)


def _hellaswag(folder: Path, part: str) -> Iterator[Item]:
    if part != "test":
        return
    text = bz2.decompress((folder / "hellaswag" / "hellaswag_val_full.txt.bz2").read_bytes()).decode()
    lines = text.removesuffix("\n").split("\n")
    if len(lines) % 6:
        raise ValueError(f"expected six lines per item, got {len(lines)} lines")
    for start in range(0, len(lines), 6):
        question, label, *endings = lines[start : start + 6]
        yield Item(question, tuple(endings), int(label))


def _hellaswag_from_hub(part: str) -> Iterator[Item]:
    for row in _load("Rowan/hellaswag", None, part, test="validation"):
        question, *endings = (
            re.sub(" +", " ", re.sub(r"\[.*?\]", "", text.replace(" [title]", ". "))).strip()
            for text in (f"{row['activity_label']}: {row['ctx']}", *row["endings"])
        )
        yield Item(question, tuple(endings), int(row["label"]))


def _arc(name: str, folder: Path, part: str) -> Iterator[Item]:
    for row in _lines(folder / "arc" / f"arc_{name}_test.jsonl", part):
        answers = tuple(dict.fromkeys(row["choices"]))  # questions with three choices repeat one
        yield Item(row["query"].removeprefix("Question: "), answers, answers.index(row["choices"][row["gold"]]))


def _arc_from_hub(name: str, part: str) -> Iterator[Item]:
    for row in _load("allenai/ai2_arc", name, part, examples="train"):
        choices = row["choices"]
        yield Item(row["question"], tuple(choices["text"]), choices["label"].index(row["answerKey"]))


def _mmlu(folder: Path, part: str) -> Iterator[Item]:
    ending = f"_{_SPLITS[part]}"
    for path in _tables(folder / "mmlu" / _SPLITS[part]):
        for row in _table(path):
            answers = tuple(row[f"choice{number}"] for number in range(4))
            yield Item(row["question"], answers, int(row["answer"]), path.stem.removesuffix(ending))


def _mmlu_from_hub(part: str) -> Iterator[Item]:
    for row in _load("cais/mmlu", "all", part, examples="dev"):
        yield Item(row["question"], tuple(row["choices"]), row["answer"], row["subject"])


def _cmmlu(folder: Path, part: str) -> Iterator[Item]:
    for path in _tables(folder / "cmmlu" / _SPLITS[part]):
        yield from (_chinese(row, path.stem) for row in _table(path))


def _cmmlu_from_hub(part: str) -> Iterator[Item]:
    from datasets import get_dataset_config_names

    for subject in get_dataset_config_names("haonan-li/cmmlu"):
        yield from (_chinese(row, subject) for row in _load("haonan-li/cmmlu", subject, part, examples="dev"))


def _chinese(row: dict[str, str], subject: str) -> Item:
    return Item(row["Question"], tuple(row[letter] for letter in "ABCD"), "ABCD".index(row["Answer"]), subject)


def _math(folder: Path, part: str) -> Iterator[Item]:
    for row in _lines(folder / "math" / "math_test.jsonl", part):
        yield Item(row["context"], (row["chain_of_thought"], row["answer"]), 0, row["category"])


def _math_from_hub(part: str) -> Iterator[Item]:
    from datasets import get_dataset_config_names
    from lm_eval.tasks.hendrycks_math.utils import last_boxed_only_string, remove_boxed

    for subject in get_dataset_config_names("EleutherAI/hendrycks_math"):
        for row in _load("EleutherAI/hendrycks_math", subject, part, examples="train"):
            answer = remove_boxed(last_boxed_only_string(row["solution"]))
            yield Item(row["problem"], (row["solution"], answer), 0, subject)


def _lines(path: Path, part: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON lines file for the part "test", and nothing for "examples"."""
    if part == "test":
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _tables(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise FileNotFoundError(f"no .csv in {folder}")
    return paths


def _table(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _load(name: str, configuration: str | None, part: str, **splits: str) -> Iterable[Any]:
    """Load the split of a hub dataset for `part`; nothing if `part` is "examples" and `splits` does not name it."""
    from datasets import load_dataset

    split = splits.get(part, "test" if part == "test" else None)
    return load_dataset(name, configuration, split=split) if split else ()


_SOURCES: dict[str, tuple[Callable[[Path, str], Iterable[Item]], Callable[[str], Iterable[Item]]]] = {
    "lambada": (_lambada, _lambada_from_hub),
    "winogrande": (_winogrande, _winogrande_from_hub),
    "hellaswag": (_hellaswag, _hellaswag_from_hub),
    "arc_easy": (partial(_arc, "easy"), partial(_arc_from_hub, "ARC-Easy")),
    "arc_challenge": (partial(_arc, "challenge"), partial(_arc_from_hub, "ARC-Challenge")),
    "mmlu": (_mmlu, _mmlu_from_hub),
    "cmmlu": (_cmmlu, _cmmlu_from_hub),
    "math": (_math, _math_from_hub),
}
