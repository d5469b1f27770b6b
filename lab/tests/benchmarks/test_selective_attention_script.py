"""benchmarks/selective_attention.py writes the expected rows; short lengths keep this to seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .scripts import script


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = script("selective_attention")
    monkeypatch.setattr(program, "CONTEXTS", (128, 256))
    monkeypatch.setattr(program, "model", lambda: iter(()))
    monkeypatch.setattr(sys, "argv", ["selective_attention.py", "--out", str(tmp_path / "rows.jsonl")])
    program.main()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    forms = [(row["form"], row["axis"], row["context"]) for row in rows]
    pairs = [(axis, context) for axis in ("query", "key") for context in (128, 256)]
    assert forms == [
        *((form, axis, context) for axis, context in pairs for form in ("whole", "blocks")),
        *(("vanilla", None, context) for context in (128, 256)),
    ]
    by_form = dict(zip(forms, rows, strict=True))
    for axis, context in pairs:
        whole, blocks = (by_form[form, axis, context] for form in ("whole", "blocks"))
        assert whole["difference"] == 0
        assert 0 < blocks["difference"] < 1e-5
        assert whole["peak_bytes"] > 2 * 3 * context**2 * 4  # scores and weights of three heads
    for axis in ("query", "key"):
        growth = {form: by_form[form, axis, 256]["growth"] for form in ("whole", "blocks")}
        assert growth["whole"] > 3 > 2.2 > growth["blocks"]
