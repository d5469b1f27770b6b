"""The tests of the other files on a CUDA device, with the Triton kernels compiled for it.

This file has the tests that compare numbers; `test_gpu_programs.py` covers graphs, compilers and memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from hypothesis import given, settings

from . import test_boundaries, test_promises, test_reference, test_shift, test_splits, test_state
from .cases import Case
from .device import MARKS, kernels_on_device
from .rounding import assert_within_one_rounding
from .strategies import cases
from .triton import test_call

pytestmark = MARKS

# The search compiles kernels for every example, so a shorter one is below. Tests of the caller's memory need
# that memory on the device.
LEFT_OUT = {
    "test_search_for_a_call_that_differs_from_the_reference",
    "test_callers_tensors_are_theirs",
    "test_a_state_shares_no_memory_with_what_it_was_made_from",
    "test_memory_kept_for_backward_is_the_inputs_and_the_plan",
    "test_without_gradients_nothing_is_kept",
}
OF_THE_KERNELS = (
    test_call.test_a_single_tensor_is_shifted_like_keys,
    test_call.test_the_widest_window,
    test_call.test_tiles_change_no_bit_but_the_order_of_the_coefficients_sum,
)


def of_every_backend(module: ModuleType) -> dict[str, Callable]:
    """Return the module's tests that take a backend."""
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_") and callable(test)}
    fixtures = {"backend", "fast_backend"}
    return {name: test for name, test in tests.items() if fixtures & inspect.signature(test).parameters.keys()}


for _module in (test_boundaries, test_promises, test_reference, test_shift, test_splits, test_state):
    _tests = of_every_backend(_module)
    assert not _tests.keys() & globals().keys(), "two tests of one name"
    globals().update({name: test for name, test in _tests.items() if name not in LEFT_OUT})
globals().update({test.__name__: test for test in OF_THE_KERNELS})


@pytest.fixture(scope="module", autouse=True)
def on_device() -> Iterator[None]:
    with kernels_on_device():
        yield


@pytest.fixture(scope="module")
def backend() -> str:
    return "triton"


@pytest.fixture(scope="module")
def fast_backend() -> str:
    return "triton"


@settings(max_examples=12)
@given(case=cases())
def test_search_for_a_call_that_differs_from_the_reference(case: Case):
    assert_within_one_rounding(case, "triton", through_state=True)
