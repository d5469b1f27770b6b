"""The folders of tests are those of the package: what is in src/kvshift/a is tested in tests/a."""

from __future__ import annotations

from pathlib import Path

import kvshift

TESTS = Path(__file__).parent
APART = {"peers", "titan", "vllm"}  # other people's tests, those of two integrations: with environments of their own


def test_folders_of_tests_are_folders_of_the_package():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert {str(folder) for folder in folders if not (Path(kvshift.__file__).parent / folder).is_dir()} == APART
