"""The sources of a benchmark's questions: the hub and files give the same, and errors name what is missing."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from kvshift_lab.commands.eval.items import find_data, read_questions
from kvshift_lab.core.errors import LabError

from .benchmark_cases import ARC, HELLASWAG, LAMBADA, MATH, WINOGRANDE, write_benchmarks

HUB_ROWS: dict[tuple[str, str | None, str], list[dict[str, Any]]] = {
    ("EleutherAI/lambada_openai", "default", "test"): [{"text": f"{context} {word}"} for context, word in LAMBADA],
    ("allenai/winogrande", "winogrande_xl", "validation"): [
        {"sentence": f"{start} _ {end}", "option1": fills[0], "option2": fills[1], "answer": str(gold + 1)}
        for start, fills, end, gold in WINOGRANDE
    ],
    ("Rowan/hellaswag", None, "validation"): [
        {
            "activity_label": question.split(": ")[0],
            "ctx": "[header] " + question.split(": ")[1],
            "endings": [f"{ending} [step]" for ending in endings],
            "label": str(gold),
        }
        for question, gold, endings in HELLASWAG
    ],
    ("allenai/ai2_arc", "ARC-Easy", "test"): [
        {
            "question": question,
            "choices": {"text": list(dict.fromkeys(choices)), "label": list("1234")},
            "answerKey": str(1 + list(dict.fromkeys(choices)).index(choices[gold])),
        }
        for question, choices, gold in ARC
    ],
    ("allenai/ai2_arc", "ARC-Easy", "train"): [
        {
            "question": "Which one rolls?",
            "choices": {"text": ["a ball", "a box"], "label": ["A", "B"]},
            "answerKey": "A",
        }
    ],
    ("EleutherAI/hendrycks_math", "algebra", "test"): [
        {"problem": problem, "solution": solution} for problem, solution, _, subject in MATH if subject == "algebra"
    ],
    ("EleutherAI/hendrycks_math", "algebra", "train"): [{"problem": "1?", "solution": "$\\boxed{1}$"}],
    ("EleutherAI/hendrycks_math", "geometry", "test"): [{"problem": MATH[2][0], "solution": MATH[2][1]}],
    ("EleutherAI/hendrycks_math", "geometry", "train"): [],
}


@pytest.mark.parametrize(
    ("name", "examples"), [("lambada", 0), ("winogrande", 0), ("hellaswag", 0), ("arc_easy", 1), ("math", 1)]
)
def test_from_the_hub_they_are_the_same(name, examples, tmp_path, monkeypatch):
    """The rows have the form that the pages of the data sets describe; the hub itself is not queried."""
    monkeypatch.setattr(
        datasets, "load_dataset", lambda path, configuration, *, split: HUB_ROWS[path, configuration, split]
    )
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["algebra", "geometry"])
    found = read_questions(name, "hub")
    assert found.tests == read_questions(name, str(write_benchmarks(tmp_path))).tests
    assert len(found.examples) == examples


def test_data_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(LabError, match="data must be a folder or hub; there is no folder /absent"):
        find_data("/absent")
    monkeypatch.setenv("KVSHIFT_SHARED_DATA", str(tmp_path))
    assert find_data(None) == str(tmp_path)
    assert find_data("hub") == "hub"
    monkeypatch.setenv("KVSHIFT_SHARED_DATA", "")
    assert find_data(None) == "hub"
    for name, missing in (("lambada", r"lambada_openai\.jsonl"), ("mmlu", r"FileNotFoundError: no \.csv in")):
        with pytest.raises(LabError, match=f"data: {name} cannot be read from {tmp_path}: .*{missing}"):
            read_questions(name, str(tmp_path))
    (tmp_path / "lambada").mkdir()
    path = tmp_path / "lambada" / "lambada_openai.jsonl"
    for content, message in (
        ("", "lambada has no questions in"),
        ("{}", "KeyError: 'context'"),
        ("{", "JSONDecodeError"),
    ):
        path.write_text(content)
        with pytest.raises(LabError, match=message):
            read_questions("lambada", str(tmp_path))
