"""The notebooks are generated from their scripts, run, and link to the project's repository."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.tiny_qwen3 import tiny_qwen3

from .generation_cases import tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/notebooks"
NAMES = ["induction", "qwen"]
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def run(name: str, monkeypatch: pytest.MonkeyPatch, **settings: str) -> dict[str, Any]:
    """Run all cells of a script as one program, with other values for the constants it assigns."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    code = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    for names, values in settings.items():
        code, number = re.subn(rf"^{names} = [^#\n]*", f"{names} = {values}  ", code, flags=re.MULTILINE)
        assert number == 1, names
    namespace: dict[str, Any] = {}
    exec(compile(code, f"{name}.py", "exec"), namespace)
    return namespace


def test_each_notebook_is_made_from_its_script():
    pytest.importorskip("jupytext", reason="needs the package jupytext")
    made = runpy.run_path(str(FOLDER / "make.py"))
    assert [script.stem for script in made["SCRIPTS"]] == NAMES
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == NAMES
    for script in made["SCRIPTS"]:
        assert script.with_suffix(".ipynb").read_text(encoding="utf-8") == made["notebook"](script), "make notebooks"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_installs_what_the_repository_holds(name: str):
    """Its first code cell installs a missing kvshift from the clone, or from the address in pyproject.toml."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    first = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))
    assert f'source = "git+{ADDRESS}"\n' in first
    assert '[f"kvshift @ {source}", f"kvshift-lab @ {source}#subdirectory=lab"]' in first
    assert 'find_spec("kvshift_lab") is None' in first
    for address in re.findall(r"https://github\.com/[^\"'\s)]*", (FOLDER / f"{name}.py").read_text(encoding="utf-8")):
        assert address.startswith(ADDRESS)


def test_induction_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    run("induction", monkeypatch, STEPS="1")
    assert len(re.findall("of the repeated tokens are right", capsys.readouterr().out)) == 5


@pytest.mark.slow
def test_one_layer_learns_to_copy_with_shift_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    run("induction", monkeypatch)
    right = [int(one) for one in re.findall(r"(\d+)% of the repeated", capsys.readouterr().out)]
    without, with_shift, all_of_it, _, none = right
    assert with_shift == all_of_it >= 95
    assert without < 50
    assert none < 50


def test_qwen_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture):
    """A tiny random Qwen3 replaces the one on the Hub."""
    encode = tokenizer()
    torch.manual_seed(0)
    config = tiny_qwen3(len(encode))
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "qwen")
    encode.save_pretrained(tmp_path / "qwen")
    monkeypatch.chdir(tmp_path)
    found = run("qwen", monkeypatch, MODEL=repr(str(tmp_path / "qwen")), **{"STEPS, ROWS, LENGTH": "1, 2, 16"})
    said = capsys.readouterr().out
    assert "KVShiftQwen3ForCausalLM: 16 coefficients; logits equal to the bit: True" in said
    assert re.search(r"held-out loss: [\d.]+ before, [\d.]+ after", said)
    assert type(found["model"]).__name__ == "KVShiftQwen3ForCausalLM"
