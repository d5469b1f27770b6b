"""Test suites of other projects, run on our operator and models. `make test-peers` fetches them and sets KVSHIFT_PEERS.

Nothing of them is in this repository, and without that variable nothing here is collected. A test that fails is an
error, unless `expected.py` says why it must; then it is an error if it passes, is skipped or fails in another way. An
entry there that fits no test is an error, too.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from .expected import EXPECTED, Expected

collect_ignore_glob = [] if "KVSHIFT_PEERS" in os.environ else ["*.py"]
MARKERS = ("accelerate_tests", "bitsandbytes", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test")
MARKERS += ("generate", "torch_compile_test", "torch_export_test")
expected_failure = pytest.StashKey[Expected]()
has_failed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: of transformers' tests")
    config.addinivalue_line("filterwarnings", "always")  # the suites emit many, and some tests look for one


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Seed what the suites leave to chance."""
    from transformers import set_seed

    set_seed(0)


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note which tests must fail; refuse entries of `expected.py` that fit no test."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    unused = {entry for entry in EXPECTED if any(item.path.stem == f"test_{entry.suite}" for item in here)}
    for item in here:
        suite, (subject, test) = item.path.stem.removeprefix("test_"), ["", *item.nodeid.split("::", 2)[1:]][-2:]
        for entry in EXPECTED:
            if entry.matches(suite, subject, test):
                item.stash[expected_failure] = entry
                unused.discard(entry)
    if unused and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("\n".join(f"expected.py: no test fits {entry}" for entry in unused))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn an expected failure into "xfailed", and everything else that an expected failure does into a failure."""
    report = yield
    entry = item.stash.get(expected_failure, None)
    if entry is None or not (call.when == "call" or (call.when == "setup" and report.skipped)):
        return report
    if call.excinfo is not None and report.failed and entry.error in str(call.excinfo.value):
        item.stash[has_failed] = True
        report.outcome, report.wasxfail = "skipped", entry.reason
    elif report.failed:
        report.longrepr = f"{report.longrepr}\nexpected to fail with {entry.error!r}"
    elif call.duration:  # that of a subtest is 0
        if item.stash.get(has_failed, False):
            report.outcome, report.wasxfail = "skipped", entry.reason
        else:
            report.outcome, report.longrepr = "failed", f"{report.outcome}, but expected to fail: {entry.reason}"
    return report
