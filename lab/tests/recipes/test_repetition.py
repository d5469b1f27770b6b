"""The recipe `repetition`: its measures, computed by hand, its continuations, and its verdicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvshift_lab.core.options import to_json
from kvshift_lab.recipes.repetition import study
from kvshift_lab.recipes.repetition.study import (
    DECODINGS,
    PROMPT,
    distinct_share,
    ends_in_loop,
    measures,
    repeated_share,
)
from kvshift_lab.study.recipe import Record
from kvshift_lab.study.run_study import job_folder

from ..study.cases import made_up

RECIPE = study.RECIPE


@pytest.mark.parametrize(
    ("text", "expected"),
    [("abcdefgh", 0.0), ("aaaaaaaa", 1 - 1 / 5), ("abcdabcd", 1 - 4 / 5), ("abcdeabcd", 1 - 5 / 6)],
)
def test_repeated_share(text: str, expected: float) -> None:
    assert repeated_share([*map(ord, text)]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("xyzababab", True),
        ("ababab", True),
        ("abcabcabc", True),
        ("xaaaaaa", True),  # "aa", three times
        ("xaaaaa", False),
        ("abababx", False),
        ("abab", False),
        ("", False),
    ],
)
def test_ends_in_loop(text: str, expected: bool) -> None:
    assert ends_in_loop([*map(ord, text)]) is expected


def test_distinct_counts_pairs_of_all_texts_once() -> None:
    assert distinct_share([[1, 2, 3], [1, 2, 1]]) == pytest.approx(3 / 6)  # 12, 23, 21


def records(less: float) -> list[Record]:
    """Return made-up pairs in which models with KV shift repeat less often by this share, if greedy."""
    found = []
    for job in study.arms("laptop"):
        for seed in range(6):
            by = less if job.arm.variant == "kv-shift" else 0.0
            share = 0.5 + 0.01 * seed - by * (1 + 0.1 * (seed % 2))
            values = {"text": 0.02, "greedy": share, "sampled": 0.1 + 0.01 * seed}
            result = {"repetition": {name: {"repeated": x, "loops": x, "distinct": x} for name, x in values.items()}}
            found.append(replace(made_up(job.arm, seed, options=to_json(job.config)), result=result))
    return found


@pytest.mark.parametrize(("less", "expected"), [(0.1, "holds"), (-0.1, "fails"), (0.0, "not shown")])
def test_verdicts(less: float, expected: str) -> None:
    found = [claim.direction for claim in RECIPE.claims(records(less))]
    assert found == [expected, expected, "not shown", "not shown"]
    RECIPE.plot(records(less))


def test_continuations_are_those_of_generate(tmp_path) -> None:
    job = study.arms("smoke")[0]
    folder = job_folder(tmp_path, job)
    job.run(folder)
    found = job.record(folder)["result"]["repetition"]
    assert [*found] == ["text", *DECODINGS]
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    rows = study.load_text_data(job.config.data, seed=0, tokenizer_folder=folder / "tokenizer").validation
    ids = torch.as_tensor(rows[: job.config.eval_rows]["input_ids"])
    greedy = [model.generate(row[None, :PROMPT], do_sample=False, max_new_tokens=64)[0, PROMPT:] for row in ids]
    assert found["greedy"] == measures([row.tolist() for row in greedy])
    assert found["text"] == measures(ids[:, PROMPT:].tolist())
    assert job.is_finished(folder)
