"""Make the notebooks from the scripts in this folder with jupytext: python examples/notebooks/make.py"""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).parent
SCRIPTS = [path for path in sorted(HERE.glob("*.py")) if path != Path(__file__)]


def notebook(script: Path) -> str:
    """Return the notebook of a script with `# %%` cells, without outputs. Every call returns the same bytes."""
    made = jupytext.read(script)
    made.metadata = nbformat.from_dict(
        {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    )
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"  # random by default
    return nbformat.writes(made) + "\n"


if __name__ == "__main__":
    for script in SCRIPTS:
        script.with_suffix(".ipynb").write_text(notebook(script), encoding="utf-8")
