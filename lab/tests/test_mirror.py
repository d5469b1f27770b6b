"""The folders of tests are those of the package: what is in kvshift_lab/a is tested in lab/tests/a."""

from __future__ import annotations

import re
from pathlib import Path

import kvshift_lab

TESTS = Path(__file__).parent
SOURCE = Path(kvshift_lab.__file__).parent
APART = {"benchmarks", "lens"}  # programs beside the lab; an integration of the library, tested through the lab


def test_folders_of_tests_are_folders_of_the_package():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert {str(folder) for folder in folders if not (SOURCE / folder).is_dir()} == APART


def test_no_test_of_the_library_needs_the_lab():
    imports = re.compile(r"^\s*(?:from|import) (?:kvshift_lab|lab)\b", re.MULTILINE)
    files = [*(TESTS.parents[1] / "tests").rglob("*.py")]
    assert len(files) > 100
    assert [path.name for path in files if imports.search(path.read_text(encoding="utf-8"))] == []
