"""Expected failures are checked both ways: what fails as `expected.py` says passes, and whatever else it does fails."""

import shutil
from pathlib import Path

import pytest

from . import conftest, expected

pytest_plugins = ["pytester"]

TESTS = """
import unittest

import pytest


class TestModel(unittest.TestCase):
    def test_fails_as_expected(self):
        raise ValueError("no such head")

    def test_fails_otherwise(self):
        raise ValueError("out of memory")

    def test_passes(self):
        pass

    def test_skips(self):
        self.skipTest("too slow")

    @unittest.skip("too slow")
    def test_is_skipped(self):
        pass

    @pytest.mark.skip("too slow")
    def test_is_marked(self):
        pass

    def test_one_part_fails(self):
        for part in range(3):
            with self.subTest(part):
                assert part != 1, "no such head"

    def test_one_part_fails_otherwise(self):
        for part in range(3):
            with self.subTest(part):
                assert part, "no such head"
                assert part != 1, "out of memory"


class TestOther:
    def test_fails(self):
        raise ValueError("no such head")

    def test_passes(self):
        pass
"""
ENTRY = 'Expected("sample", "TestModel", "test_.*", error="no such head", reason="because")'
UNUSED = 'Expected("sample", "TestModel", "test_that_is_gone", error="no such head", reason="because")'


@pytest.fixture
def sample(pytester: pytest.Pytester) -> Path:
    folder = pytester.mkpydir("suites")
    shutil.copy(conftest.__file__, folder)
    (folder / "test_sample.py").write_text(TESTS)
    return folder


def expect(folder: Path, *entries: str) -> None:
    rules = Path(expected.__file__).read_text()
    (folder / "expected.py").write_text(f"{rules}\n\nEXPECTED = ({', '.join(entries)},)\n")


def test_only_the_expected_failure_passes(pytester: pytest.Pytester, sample: Path):
    expect(sample, ENTRY)
    reports = pytester.inline_run(sample).getreports("pytest_runtest_logreport")
    failed = {report.nodeid.partition("::")[2] for report in reports if report.failed}
    assert failed == {
        "TestModel::test_fails_otherwise",
        "TestModel::test_passes",
        "TestModel::test_skips",
        "TestModel::test_is_skipped",
        "TestModel::test_is_marked",
        "TestModel::test_one_part_fails_otherwise",
        "TestOther::test_fails",
    }
    expected_failures = {report.nodeid.partition("::")[2] for report in reports if hasattr(report, "wasxfail")}
    assert expected_failures == {
        "TestModel::test_fails_as_expected",
        "TestModel::test_one_part_fails",
        "TestModel::test_one_part_fails_otherwise",
    }


def test_an_entry_that_fits_no_test(pytester: pytest.Pytester, sample: Path):
    expect(sample, ENTRY, UNUSED)
    result = pytester.runpytest_inprocess(sample)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*expected.py: no test fits *test_that_is_gone*")
