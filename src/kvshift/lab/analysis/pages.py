"""HTML pages that need nothing but themselves: templates of this folder, images within the page."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder; a name that the template has and `values` lacks is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("kvshift.lab.analysis", package_path=".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(template).render(values)


def inline(svg: Path) -> str:
    """An SVG file as a data URI."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.read_bytes()).decode("ascii")
