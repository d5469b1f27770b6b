"""docs/tasks.md: its code runs, and its sequences are those of the docstrings, which other tests check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvshift_lab.tasks import cfg, hop, induction, mqar
from kvshift_lab.tasks.igsm import task as igsm

TEXT = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_the_code_runs():
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict = {}
    exec(compile(block, "docs/tasks.md", "exec"), names)
    assert names["batch"].input_ids.shape == (64, 48)
    assert torch.equal(names["training"][4711].labels, names["batch"].labels)


@pytest.mark.parametrize(("module", "rows"), [(induction, 6), (mqar, 3), (hop, 3), (cfg, 6), (igsm, 10)])
def test_sequences_are_those_of_the_docstring(module, rows: int):
    drawn = re.findall(r"^    (?:script|latest|raw|input_ids|labels|slices)  .*$", module.__doc__, flags=re.MULTILINE)
    assert len(drawn) == rows
    assert all(line in TEXT for line in drawn)
