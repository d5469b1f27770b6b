"""The report of a preset names the text that its runs have read."""

from __future__ import annotations

from typing import Any

import pytest

from kvshift_lab.recipes.catalogue import find_recipe
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.preset_report import text_read
from kvshift_lab.study.recipe import Record

WIKI = "wiki2014-en/train-*.jsonl.xz"
JOBS = find_recipe("decide").jobs("laptop", [0])


def record(corpus: str, steps: int = 100) -> Record:
    data = {"corpus": corpus, "sequence_length": 50}
    options: dict[str, Any] = {"data": data, "data_facts": {"train_rows": 40}, "tokens_per_step": 80, "steps": steps}
    return Record(
        arm=Arm(variant="kv-shift"), seed=0, config_hash="", options=options, environment={}, curve={}, result={}
    )


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], ""),
        ([record(WIKI, 10), record(WIKI)], f"The runs have read `{WIKI}` (up to 4 times).\n\n"),
        (
            [record("tinyshakespeare")],
            "**The runs have read Tiny Shakespeare, the bundled text of 1.1 MB (up to 4 times). The notes describe "
            f"other text: `{WIKI}`, `wiki2014-en/valid.jsonl.xz`.**\n\n",
        ),
    ],
    ids=["no text", "the text of the notes", "another text"],
)
def test_the_text_that_was_read_is_named(records: list[Record], expected: str) -> None:
    assert text_read(records, JOBS) == expected
