"""Settings and fixtures that all tests share, those of the library and those of the lab."""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests import interpreter

interpreter.fix()

# Otherwise MKL's order of sums depends on strides and addresses on some CPUs (AMD's Zen 4), and tests compare bits.
os.environ.setdefault("MKL_CBWR", "AUTO")

# Every run uses the same examples. To search for new ones: pytest --hypothesis-profile=search
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=300)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000, print_blob=True)
hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all but the last of each group of cases that run in Triton's interpreter.

    The interpreter takes a hundred times as long as other backends, so `make test` runs only one case of each group.
    Each test marked `interpreted` is a group, and so is each file whose tests run on all backends. Cases are
    parametrized from the least to the most demanding, so the last one covers most.
    """
    cases = [item for item in items if _is_interpreted(item) and not item.get_closest_marker("slow")]
    last = {_group(item): item for item in cases}
    for item in cases:
        if last[_group(item)] is not item:
            item.add_marker(pytest.mark.slow)


def _group(item: pytest.Item) -> str:
    test = item.nodeid.partition("[")[0]
    return test if item.get_closest_marker("interpreted") else test.partition("::")[0]


def _is_interpreted(item: pytest.Item) -> bool:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    params = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return item.get_closest_marker("interpreted") is not None or "triton" in params


@pytest.fixture(autouse=True, scope="session")
def memory_that_nobody_wrote_is_nan() -> Iterator[None]:
    """Fill memory that `torch.empty` returns with NaN, so that unwritten outputs show; require determinism."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Skip fsync for files and folders: it takes 8 ms per call, and no test cuts the power."""
    fsync = os.fsync

    def fsync_of_others(number: int) -> None:
        mode = os.fstat(number).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            fsync(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync_of_others)
        yield


@pytest.fixture(autouse=True, scope="module")
def what_is_left_of_other_files_is_no_garbage() -> None:
    """Freeze all objects before each file: training collects garbage in each run, and compiled graphs are never freed.

    Otherwise, the last tests of `make test-slow` that train spend most of their time on looking at what others left.
    """
    gc.collect()
    gc.freeze()
