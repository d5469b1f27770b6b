"""Settings that all tests share."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator

import hypothesis
import pytest
import torch

from . import interpreter
from .models_refused import models_refused

interpreter.fix()

# The same examples on every run. To hunt for new ones: pytest --hypothesis-profile=search
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=300)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000, print_blob=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def memory_that_nobody_wrote_is_nan() -> Iterator[None]:
    """What `torch.empty` returns, so that an output left unwritten is seen; operations without fixed order raise."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_finish() -> None:
    """What was imported stays: accelerate collects garbage at every training run, and need not see it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Around a test and all fixtures that are made for it."""
    if item.get_closest_marker("no_models") is None:
        return (yield)
    with models_refused():
        return (yield)
