"""Hooks of mkdocs: the pages as they are on disk become a site, and nothing is written twice.

The index, README.md, says which pages there are, under which door and in which order. Figures outside of docs/ are
taken into the site; other links that lead out of docs/ lead to the repository, whose address is in pyproject.toml. The
API reference is made from docstrings.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import kvshift

ROOT = Path(__file__).parent.parent
PUBLIC = {
    "Operator and layers": [f"kvshift.{name}" for name in kvshift.__all__ if not name.startswith("_")],
    "Models": [
        "kvshift.models.llama.KVShiftLlamaConfig",
        "kvshift.models.llama.KVShiftLlamaForCausalLM",
        "kvshift.models.retrofit.add_kv_shift",
        "kvshift.models.retrofit.load_kv_shift",
        "kvshift_lab.check.check_model",
        "kvshift.models.baichuan_m1.BaichuanM1Config",
        "kvshift.models.baichuan_m1.BaichuanM1ForCausalLM",
    ],
}
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(#[^)\s]*)?(?=\))")


def _repository() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def _outside(page: str, target: str) -> str | None:
    """Where a link of a page leads, from the root of the repository, if that is out of docs/."""
    path = normpath(PurePosixPath("docs", page).parent / target)
    return None if path.startswith("docs/") or path == "docs" else path


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation: the doors of the index, and what stands behind each."""
    config.repo_url, config.repo_name = _repository(), "kvshift"
    nav: list[Any] = [{"Documentation": "README.md"}, {"The idea in a minute": "induction/README.md"}]
    _, *doors = (ROOT / "docs/README.md").read_text(encoding="utf-8").split("\n## ")
    for door in doors:
        title, text = door.split("\n", 1)
        pages = []
        for name, target in re.findall(r"^\| \[([^]]+)\]\(([^)]+)\)", text, flags=re.MULTILINE):
            outside = _outside("README.md", target)
            pages.append({name: f"{config.repo_url}/blob/HEAD/{outside}" if outside else target})
        nav.append({title: pages})
    nav[2]["I have a model"].append({"API reference": "reference.md"})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Figures of results, and the API reference."""
    for figure in ROOT.glob("results/**/*.svg"):
        files.append(File.generated(config, str(figure.relative_to(ROOT)), abs_src_path=str(figure)))
    parts = [f"## {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) for title, names in PUBLIC.items()]
    text = "# API reference\n\nMade from docstrings. What is not here may change.\n\n" + "\n\n".join(parts)
    files.append(File.generated(config, "reference.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead out of docs/ lead to a figure of the site, or into the repository."""
    here = page.file.src_uri
    up = "../" * here.count("/")

    def led(match: re.Match[str]) -> str:
        outside = _outside(here, match[1])
        if outside is None:
            return match[0]
        if outside.endswith(".svg"):
            return f"{up}{outside}"
        return f"{config.repo_url}/blob/HEAD/{outside}{match[2] or ''}"

    return _LINK.sub(led, markdown)
