"""The package's metadata: README, addresses and citation. `make dist` builds and installs the wheels themselves."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
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


PROJECTS = {
    place: tomllib.loads((ROOT / place / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for place in (".", "lab")
}
NAMED_BY_PAGE = {
    "mlx",
    "mlx_lm",
    "transformer_lens",
    "wandb",
}  # in no extra: by the page that needs them, and by an error
BROUGHT_BY_HOST = {"huggingface_hub", "spmd_types"}  # transformers and torchtitan have their objects in their interface


def requirements(project: dict) -> set[str]:
    """Return the distributions that a project declares, extras included, as names of modules."""
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {re.split(r"[^\w-]", line)[0].lower().replace("-", "_") for line in lines}


@pytest.mark.parametrize(("place", "sources"), [(".", "src"), ("lab", "lab/src")])
def test_every_package_that_is_imported_is_a_dependency_or_in_an_extra(place: str, sources: str):
    """What another package happens to bring may be gone with its next version, and no extra names it to a user."""
    imported: set[str] = set()
    for path in (ROOT / sources).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    declared = set().union(*map(requirements, PROJECTS.values() if place == "lab" else [PROJECTS["."]]))
    foreign = imported - sys.stdlib_module_names - {"kvshift", "kvshift_lab"}
    installed = packages_distributions()
    missing = {
        name
        for name in foreign - NAMED_BY_PAGE - BROUGHT_BY_HOST
        if not declared & {each.lower().replace("-", "_") for each in installed.get(name, [name])}
    }
    assert foreign > {"torch"}
    assert missing == set()


def test_extras_that_pages_and_programs_name_exist():
    extras = {place: set(project["optional-dependencies"]) for place, project in PROJECTS.items()}
    files = [
        path for pattern in ("*.md", "docs/**/*.md", "lab/*.md", "examples/**/*.py") for path in ROOT.glob(pattern)
    ]
    found = {
        (str(path.relative_to(ROOT)), place, extra)
        for path in files
        for place, several in re.findall(
            r"pip\s+install[^`]*?'(\.(?:/lab)?)\[([\w,-]+)\]'", path.read_text(encoding="utf-8")
        )
        for extra in several.split(",")
    }
    assert len(found) > 8
    assert [one for one in sorted(found) if one[2] not in extras["lab" if one[1] == "./lab" else "."]] == []
