"""The example in docs/retrofit.md runs unchanged."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "retrofit.md"


def test_the_example_runs(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    exec(compile(block, str(PAGE), "exec"), namespace)
    assert type(namespace["model"]).__name__ == "KVShiftGPT2LMHeadModel"
    assert [group["name"] for group in namespace["groups"]] == ["decay", "no_decay", "shift"]
