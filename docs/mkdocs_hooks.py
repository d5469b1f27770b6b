"""Hooks of mkdocs: the pages as they are on disk become a site, and nothing is written twice.

The index, README.md, says which pages there are, under which door and in which order. Pages and figures of results/
are taken into the site; other links that lead out of docs/ lead to the repository, whose address is in pyproject.toml.
reference.md names the public API, and its docstrings are added.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import tomllib
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

import kvshift

ROOT = Path(__file__).parent.parent
_NAMES = re.compile(r"^\| `([\w.]+)` \| (.*?) \|", re.MULTILINE)  # rows of reference.md: a module, public names
_RECORDS = ("findings.md", "results.md")  # search ranks these, which mention every word, after the guides
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(#[^)\s]*)?(?=\))")


def _repository() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def _version() -> str:
    """The version with the date of the commit, or today's where there is no repository."""
    git = subprocess.run(["git", "log", "-1", "--format=%cs"], cwd=ROOT, capture_output=True, text=True)
    return f"kvshift {kvshift.__version__}, {git.stdout.strip() or datetime.date.today().isoformat()}"


def _target(page: str, link: str) -> str:
    """Where a link of a page leads, from the root of the repository."""
    here = PurePosixPath(page) if page.startswith("results/") else PurePosixPath("docs", page)
    return normpath(here.parent / link)


def _in_site(target: str) -> str | None:
    """The place of a file in the site, if it is there."""
    if target.startswith("docs/") and not target.endswith(".py"):
        return target.removeprefix("docs/")
    return target if target.startswith("results/") and target.endswith((".svg", "/page.md")) else None


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation: the doors of the index, and what stands behind each."""
    config.repo_url, config.repo_name = _repository(), "kvshift"
    config.copyright = _version()
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # anchors as on GitHub, where the same links must work
    nav: list[Any] = [{"Home": "README.md"}, {"The idea in a minute": "induction/README.md"}]
    _, *doors = (ROOT / "docs/README.md").read_text(encoding="utf-8").split("\n## ")
    for door in doors:
        title, text = door.split("\n", 1)
        pages = []
        for name, target in re.findall(r"^\| \[([^]]+)\]\(([^)]+)\)", text, flags=re.MULTILINE):
            path = _target("README.md", target)
            if not _in_site(path):
                pages.append({name: f"{config.repo_url}/blob/HEAD/{path}"})
            elif "#" not in target:  # part of a page; mkdocs takes pages only
                pages.append({name: target})
        nav.append({title: pages})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages and figures of results."""
    for path in (*ROOT.glob("results/**/*.svg"), *ROOT.glob("results/*/page.md")):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead within the site or into the repository. The home gets the version, the reference its docstrings."""
    here = page.file.src_uri
    if here == "README.md":
        markdown = markdown.replace("# kvshift\n", f"# kvshift\n\n{_version()}\n", 1)
    if here == "reference.md":
        for module, names in _NAMES.findall(markdown):
            parts = [f"::: {module}.{name}" for name in re.findall(r"`(\w+)`", names)]
            markdown += "\n\n".join(["", f"## {module}", *parts])
    if here in _RECORDS or here.startswith("results/"):
        page.meta["search"] = {"boost": 0.1}
    if here == "results.md":
        page.meta["hide"] = ["toc"]  # room for its table

    def led(match: re.Match[str]) -> str:
        target = _target(here, match[1])
        inside = _in_site(target)
        led_to = f"{config.repo_url}/blob/HEAD/{target}" if inside is None else "../" * here.count("/") + inside
        return f"{led_to}{match[2] or ''}"

    return _LINK.sub(led, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Leave out the part of the theme that asks GitHub for stars and versions: nothing is fetched from elsewhere."""
    return output.replace('data-md-component="source"', "")


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same in pages without a source, such as the one for a wrong address."""
    return output_content.replace('data-md-component="source"', "")
