"""The example in docs/analyze.md prints the output below it, and the options that the page names exist."""

import dataclasses
import re
from pathlib import Path

from kvshift_lab.commands.analyze.command import AnalyzeConfig

PAGE = (Path(__file__).parents[4] / "docs/analyze.md").read_text(encoding="utf-8")


def test_the_example_prints_what_stands_below_it(capsys):
    code, rest = PAGE.split("```python\n")[1].split("```\n", 1)
    exec(code, {})
    printed = [line.removeprefix("    ") for line in rest.splitlines() if line.startswith("    ")]
    assert capsys.readouterr().out.splitlines() == printed
    assert len(printed) == 3


def test_options_that_it_names_exist():
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", PAGE)}
    assert named == {"text", "maps", "out", "begin", "lowest_token"}
    assert named <= {field.name for field in dataclasses.fields(AnalyzeConfig)}
