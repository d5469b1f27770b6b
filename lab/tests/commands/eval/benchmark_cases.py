"""Benchmarks of a few questions in the layout of `questions`, and scripted models for lm-eval."""

from __future__ import annotations

import bz2
import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import LM

SHARED = Path(os.environ.get("KVSHIFT_SHARED_DATA") or "no-such-folder")
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="KVSHIFT_SHARED_DATA names no folder of reference data")

LAMBADA = [("to be or not to be, that is the", "question"), ("whether 'tis nobler in the", "mind"), ("to be or", "not")]
WINOGRANDE = [
    ("The cup fits not into the bag as", ("the cup", "the bag"), "is too large.", 0),
    ("Mary saw Ann because", ("Mary", "Ann"), "was tall.", 1),
]
HELLASWAG = [
    ("Tea: A woman boils water. she", 3, ("runs.", "flies to the moon.", "eats a bell and sleeps.", "pours it.")),
    ("Mowing: A man starts a mower. he", 0, ("mows the lawn.", "swims.", "sings to a mower.", "is a lawn.")),
    ("Ski: A girl stands on snow. she", 2, ("is the snow.", "cooks snow.", "skis down.", "is a ski and a girl.")),
]
ARC = [
    ("Which one is warm?", ["ice", "fire", "snow", "frost"], 1),
    ("Which way does it change?", ["more", "less", "more", "not at all"], 3),  # one of the choices is repeated
    ("Which one is a plant?", ["a dog", "an oak tree", "a very old stone", "air"], 1),
    ("Which one is a metal?", ["wood", "water", "iron", "glass"], 2),
    ("Which one flies?", ["a bird", "a fish", "a worm", "a tree"], 0),
    ("Which one swims?", ["a cat", "a fish", "a stone", "a hill"], 1),
    ("Which one burns?", ["sand", "salt", "rock", "oil"], 3),
]
MMLU = {
    "abstract_algebra": {
        "dev": [(f"What is {n} + 1?", [str(n), str(n + 1), "-1", "none"], 1) for n in range(5)],
        "test": [("What is 7 - 7?", ["0", "7", "14", "seventy-seven"], 0), ("Is 2 odd?", ["yes", "no", "2", "22"], 1)],
    },
    "anatomy": {
        "dev": [(f"Where is bone {n}?", ["arm", "leg", "head", "no, it isn't"], n % 4) for n in range(5)],
        "test": [("How many hands?", ["one", "two", "three", "a dozen"], 1), ("Red?", ["a", "bb", "ccc", "dddd"], 3)],
    },
}
CMMLU = {
    subject: {
        "dev": [(f"{n} 加一等于多少？", [str(n), str(n + 1), "零", "不知道"], 1) for n in range(5)],
        "test": [(f"{n}号水是什么颜色？", ["红色的", "蓝", "无色", "黑"], right) for n, right in enumerate(rights)],
    }
    for subject, rights in (("agronomy", [2]), ("world_religions", [0, 3, 1]))
}
MATH = [
    ("What is $1+1$?", "One and one make $\\boxed{2}$.", "2", "algebra"),
    ("Half of one?", "It is $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}", "algebra"),
    ("Sides of a square?", "There are $\\boxed{4}$.", "4", "geometry"),
]

Ask = Callable[[str, str], float]


def write_benchmarks(folder: Path) -> Path:
    """Write all benchmarks in the layout of `questions`, and return their folder."""
    _lines(folder / "lambada" / "lambada_openai.jsonl", [{"context": c, "continuation": w} for c, w in LAMBADA])
    winogrande = [
        {"context_options": [f"{start} {fill}" for fill in fills], "continuation": end, "gold": gold}
        for start, fills, end, gold in WINOGRANDE
    ]
    _lines(folder / "winogrande" / "winogrande_xl_dev.jsonl", winogrande)
    (folder / "hellaswag").mkdir()
    text = "".join("\n".join([question, str(gold), *endings]) + "\n" for question, gold, endings in HELLASWAG)
    (folder / "hellaswag" / "hellaswag_val_full.txt.bz2").write_bytes(bz2.compress(text.encode()))
    for name, items in (("easy", ARC), ("challenge", ARC[::-1])):
        rows = [{"query": f"Question: {q}", "choices": choices, "gold": gold} for q, choices, gold in items]
        _lines(folder / "arc" / f"arc_{name}_test.jsonl", rows)
    for subject, splits in MMLU.items():
        for split, items in splits.items():
            head = ["question", *(f"choice{n}" for n in range(4)), "answer"]
            _table(folder / "mmlu" / split / f"{subject}_{split}.csv", head, [(q, *c, g) for q, c, g in items])
    for subject, splits in CMMLU.items():
        for split, items in splits.items():
            rows = [(n, q, *c, "ABCD"[g]) for n, (q, c, g) in enumerate(items)]
            _table(folder / "cmmlu" / split / f"{subject}.csv", ["", "Question", *"ABCD", "Answer"], rows)
    names = ("context", "chain_of_thought", "answer", "category")
    _lines(folder / "math" / "math_test.jsonl", [dict(zip(names, row, strict=True)) for row in MATH])
    return folder


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _table(path: Path, head: list[str], rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([head, *rows])


class Scripted(LM):
    """A model whose log-likelihoods and texts are given by functions of the context and the continuation.

    A continuation of log-likelihood 0 is the one that greedy decoding would write.
    """

    def __init__(self, likelihood: Ask, write: Callable[[str], str] = str) -> None:
        super().__init__()
        self._likelihood, self._write = likelihood, write

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        found = [self._likelihood(*request.args) for request in requests]
        return [(value, value == 0) for value in found]

    def generate_until(self, requests: list[Any]) -> list[str]:
        return [self._write(request.args[0]) for request in requests]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        raise NotImplementedError
