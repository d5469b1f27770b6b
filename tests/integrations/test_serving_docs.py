"""docs/serving.md names exactly the options that the plugin refuses. This does not need vLLM."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "src" / "kvshift" / "integrations" / "vllm_plugin"
CHECKS, LAYERS = PLUGIN / "start_checks.py", PLUGIN / "paged_attention.py"
PAGE = ROOT / "docs" / "serving.md"


def refused() -> set[str]:
    """Return the options that messages of the plugin begin with ("a must be ...", "a and b must be ...", loops)."""
    names: set[str] = set()
    tree = ast.parse(CHECKS.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Yield):
            first = node.value.values[0] if isinstance(node.value, ast.JoinedStr) else node.value
            if isinstance(first, ast.Constant):
                found = re.match(r"(\w+)(?: and (\w+))? (?:must|is not|of)\b", str(first.value))
                assert found is not None, first.value
                names |= {name for name in found.groups() if name}
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            names |= {str(ast.literal_eval(one)) for one in node.iter.elts}
    return names | set(re.findall(r'"(\w+) must ', LAYERS.read_text(encoding="utf-8")))


def test_the_page_names_what_is_refused() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("## What is refused\n")
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(named) > 20
    assert sorted(named) == sorted(refused())
