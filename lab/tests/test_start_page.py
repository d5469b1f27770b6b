"""The commands and the code of docs/start.md run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_start_page_names_what_the_project_has():
    page = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    (pip .*)$", page, re.MULTILINE)
    assert shlex.split(line) == ["pip", "install", ".", "./lab"]
    (lines,) = re.findall(r"fewer than (\d+) lines", page)
    assert len((ROOT / "examples/tiny_gpt.py").read_text(encoding="utf-8").splitlines()) < int(lines)


@pytest.mark.slow
def test_every_command_and_block_of_the_start_page_runs(tmp_path: Path):
    """Run in order, in one folder: first all commands but `pip install`, then the Python blocks as one program."""
    text = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(found) == text.count("```") // 2
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("TRITON_INTERPRET", None)  # with it, the report takes a minute, in place of 4 s
    python: list[str] = []
    for language, block in found:
        if language == "python":
            python.append(block)
            continue
        assert language == ""
        for command in block.splitlines():
            arguments = shlex.split(command.replace("--steps 100", "--steps 10"))  # only that they run matters
            run = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
            if command.startswith("kvshift generate docs/induction/with"):
                assert run.stdout == "k d r a b m t e a b m t e a\n"
            if command.startswith("kvshift check"):
                verdicts = re.findall(r"^[\w:, ]+?  +(right|wrong|cannot)\b", run.stdout, re.MULTILINE)
                assert len(verdicts) > 20
                assert set(verdicts) == {"right"}
    code = tmp_path / "start.py"
    code.write_text("\n".join(python), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert len(python) == 3
