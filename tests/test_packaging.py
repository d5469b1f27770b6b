"""The package's metadata: README, addresses and citation. `make dist` builds and installs the wheels themselves."""

import re
import tomllib
from pathlib import Path

import yaml

import kvshift

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
ADDRESS = tomllib.loads(PYPROJECT)["project"]["urls"]["Repository"]


def links(text: str) -> list[str]:
    return [one or other for one, other in re.findall(r'\]\(([^)\s]+)|(?:src|href)="([^"]+)', text)]


RELATIVE = [link for link in links(README) if not link.startswith(("http", "#"))]


def test_what_the_readme_links_to_is_there():
    assert RELATIVE
    assert [link for link in RELATIVE if not (ROOT / link.partition("#")[0]).exists()] == []


def test_links_and_images_of_the_readme_are_absolute_on_an_index_page():
    page = README
    for rule in tomllib.loads(PYPROJECT)["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(rule["pattern"], rule["replacement"], page)
    images = set(re.findall(r"!\[[^]]*\]\(([^)\s]+)", README))
    expected = [f"{ADDRESS}/{'raw' if link in images else 'blob'}/HEAD/{link}" for link in RELATIVE]
    assert [link for link in links(page) if link.startswith(ADDRESS)] == expected
    assert all(link.startswith(("https://", "#")) for link in links(page))


def test_every_address_of_the_project_is_below_the_one_of_its_repository():
    found = re.findall(r"https://github\.com/[^\"'\s]*", PYPROJECT)
    assert len(found) >= 6
    assert {re.match(re.escape(ADDRESS) + "(?![^/])", one) is not None for one in found} == {True}


def test_the_citation_names_this_version_and_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads(PYPROJECT)["project"]
    assert citation["version"] == kvshift.__version__
    assert (citation["title"], citation["license"]) == (project["name"], project["license"])
    assert citation["authors"] == project["authors"]


def test_the_lab_needs_the_library_of_its_own_version():
    lab = tomllib.loads((ROOT / "lab/pyproject.toml").read_text(encoding="utf-8"))["project"]
    library = tomllib.loads(PYPROJECT)["project"]
    assert lab["version"] == kvshift.__version__
    assert lab["dependencies"][0] == f"kvshift=={kvshift.__version__}"
    assert lab["urls"]["Repository"] == ADDRESS
    assert (ROOT / "lab/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert [lab[name] for name in ("license", "authors", "requires-python")] == [
        library[name] for name in ("license", "authors", "requires-python")
    ]
