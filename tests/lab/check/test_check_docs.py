"""The program in docs/check.md runs."""

from pathlib import Path


def test_the_program_runs(capsys):
    page = (Path(__file__).parents[3] / "docs/check.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    error, tolerance = map(float, capsys.readouterr().out.split())
    assert error < tolerance
