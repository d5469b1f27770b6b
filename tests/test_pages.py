"""The pages of docs/: the index reaches all of them, links are valid, and the commands of the start page run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvshift.lab.variants.by_name import VARIANTS

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "results").glob("*/page.md")),
    ROOT / "src/kvshift/ops/README.md",
]
INDEX = ROOT / "docs/README.md"
RESULTS = [page for page in PAGES if str(page.relative_to(ROOT)).startswith("docs/results")]  # generated pages


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    return [link for link in found if not link.startswith(("http:", "https:", "mailto:"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings: lower case, no punctuation, dashes for spaces, numbers."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        name = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        base = re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")
        number = sum(re.fullmatch(rf"{re.escape(base)}(-\d+)?", other) is not None for other in found)
        found.add(f"{base}-{number}" if number else base)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path):
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_index():
    """A page of results may be linked from another page of results instead."""
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in (INDEX, *RESULTS)
        for link in links(page)
        if page is INDEX or "results" in link
    }
    assert [page.name for page in sorted((ROOT / "docs").rglob("*.md")) if page not in linked | {INDEX}] == []


def test_pages_that_the_code_names_are_there():
    named = {
        (name, str(path.relative_to(ROOT)))
        for path in sorted((ROOT / "src").rglob("*.py"))
        for name in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert [(name, path) for name, path in sorted(named) if not (ROOT / name).exists()] == []


def test_numbers_of_the_lessons_are_recorded_elsewhere():
    """Every number with a decimal point also occurs in the findings, the results or the page on comparisons."""
    pages = [ROOT / "docs/findings.md", *RESULTS, ROOT / "docs/compare.md"]
    number = r"(?<![\w.])\d+\.\d+(?![\w.]*\d)"
    recorded = {found for page in pages for found in re.findall(number, page.read_text(encoding="utf-8"))}
    used = re.findall(number, (ROOT / "docs/lessons.md").read_text(encoding="utf-8"))
    assert len(used) > 60
    assert [one for one in used if one not in recorded] == []


def test_the_start_page_names_what_the_project_has():
    page = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    (pip .*)$", page, re.MULTILINE)
    assert shlex.split(line) == ["pip", "install", ".[lab]"]
    assert re.search(r"^lab = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    (lines,) = re.findall(r"fewer than (\d+) lines", page)
    assert len((ROOT / "examples/tiny_gpt.py").read_text(encoding="utf-8").splitlines()) < int(lines)


def test_every_variant_has_its_line():
    page = (ROOT / "docs/variants.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert sorted(name for cell in cells for name in re.findall(r"`([^`]+)`", cell)) == sorted(VARIANTS)


@pytest.mark.slow
def test_every_command_and_block_of_the_start_page_runs(tmp_path: Path):
    """Run in order, in one folder: first all commands but `pip install`, then the Python blocks as one program."""
    text = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(found) == text.count("```") // 2
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
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
