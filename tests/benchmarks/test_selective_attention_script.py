"""benchmarks/selective_attention.py: what it writes, at lengths so short that it takes seconds."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "selective_attention.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("selective_attention_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "CONTEXTS", (128, 256))
    monkeypatch.setattr(script, "model", lambda: iter(()))
    monkeypatch.setattr(sys, "argv", ["selective_attention.py", "--out", str(tmp_path / "rows.jsonl")])
    script.main()
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
        assert whole["peak_bytes"] > 2 * 3 * context**2 * 4  # scores of three heads, and their weights
    for axis in ("query", "key"):
        growth = {form: by_form[form, axis, 256]["growth"] for form in ("whole", "blocks")}
        assert growth["whole"] > 3 > 2.2 > growth["blocks"]
