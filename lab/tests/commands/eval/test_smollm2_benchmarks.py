"""`kvshift eval --tasks` from end to end on a trained language model: its scores are far above chance."""

from __future__ import annotations

from collections import Counter

import pytest

from kvshift_lab.commands.eval.benchmarks import load_tasks
from kvshift_lab.commands.eval.command import evaluate
from kvshift_lab.commands.eval.options import EvalConfig
from tests.smollm2 import FOLDER, pretrained

from .benchmark_cases import SHARED, needs_shared

pytestmark = [*pretrained, pytest.mark.shared, needs_shared]

LIMIT = 200


def guessed_words() -> float:
    """Return the best score on LAMBADA of always giving one word, or drawing a word of each passage, by counting."""
    asked = load_tasks(["lambada"], str(SHARED))["lambada"].eval_docs.select(range(LIMIT))
    pairs = [(row["context"].split(), row["continuation"].strip()) for row in asked]
    always = Counter(word for _, word in pairs).most_common(1)[0][1] / LIMIT
    drawn = sum(passage.count(word) / len(passage) for passage, word in pairs) / LIMIT
    return max(always, drawn)


def test_far_above_chance():
    report = evaluate(EvalConfig(model=str(FOLDER), tasks=("lambada", "arc_easy_text"), limit=LIMIT, data=str(SHARED)))
    chance = {"lambada": guessed_words(), "arc_easy_text": report["chance"]["arc_easy_text"]}
    assert chance["lambada"] < 0.05
    assert chance["arc_easy_text"] == pytest.approx(0.25, abs=0.01)
    for task, found in report["models"][0]["tasks"].items():
        assert found["items"] == LIMIT
        assert found["score"] > chance[task] + 5 * found["stderr"], f"{task}: {found}"
