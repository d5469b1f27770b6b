"""The pages of docs/: the index reaches all of them, and links are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
        for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "lab/src").rglob("*.py")])
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
