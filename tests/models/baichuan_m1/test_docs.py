"""The programs in docs/baichuan_m1.md run."""

import re
from pathlib import Path
from typing import Any


def test_the_programs_run(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[3] / "docs" / "baichuan_m1.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == text.count("```") // 2 == 2
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/baichuan_m1.md", "exec"), names)
    assert capsys.readouterr().out.startswith("tensor([[")
    assert callable(names["load_authors"])
