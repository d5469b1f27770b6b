"""Self-contained HTML pages, rendered from the templates of this folder with images embedded."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any


def render(template: str, **values: Any) -> str:
    """Render a template of this folder; a name that is missing from `values` is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("kvshift_lab.analysis", package_path=".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(template).render(values)


def inline(svg: Path) -> str:
    """Return an SVG file as a data URI."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.read_bytes()).decode("ascii")
