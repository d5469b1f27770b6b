"""The progress of a sweep, read from the files that its jobs write."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshift_lab.study.sweep_progress import last_step


def write(out: Path, text: str) -> None:
    out.mkdir(exist_ok=True)
    (out / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("", 0),
        ('{"kind": "train", "step": 5}\n', 5),
        ('{"step": 5}\n{"step": 6}\n{"st', 6),  # the last line is still being written
        ('{"step": 5}\nnull\n[]\n', 5),
        ('{"step": 7}\n' * 20_000, 7),
    ],
)
def test_the_last_whole_line_tells_the_step(tmp_path: Path, text: str, step: int) -> None:
    write(tmp_path, text)
    assert last_step(tmp_path / "metrics.jsonl") == step
