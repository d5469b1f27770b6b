"""After the disk was full, the file holds all answers that were kept, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshift_lab.commands.eval.answer_cache import open_answer_cache
from kvshift_lab.core.errors import RunFailedError

from ...run_cases import disk_of

LINE = '{"key": "0", "answer": "to be"}\n'


@pytest.mark.parametrize("rest", range(0, len(LINE), 6))
def test_a_disk_that_fills_up_within_an_answer(tmp_path: Path, rest: int) -> None:
    """A part of an answer must not stay in the file, where the next answer would be joined to it in one line."""
    output, path = tmp_path / "eval.json", tmp_path / "eval.answers.jsonl"
    with open_answer_cache(output) as kept:
        kept.add("0", "to be")
        with disk_of(len(LINE) + rest), pytest.raises(RunFailedError, match=r"output: writing to .*jsonl failed: "):
            kept.add("1", "to be")
        assert path.read_text() == LINE
        assert "1" not in kept
        kept.add("1", "or not")  # there is room again
    assert path.read_text() == LINE + LINE.replace("0", "1").replace("to be", "or not")
    with open_answer_cache(output) as kept:
        assert dict(kept) == {"0": "to be", "1": "or not"}
