"""The self-test before the first use of the Triton kernels by "auto", here in Triton's interpreter with CPU tensors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from kvshift.ops import dispatch, kv_shift, shift_tokens
from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.small_calls import Kind, difference
from kvshift.ops.triton import launch, self_test

from ..conftest import skip_unless_built
from .test_mutants import MUTANTS, PLAIN

CPU = torch.device("cpu")
ROTARY = tuple(torch.randn(2, 1, 5, 1, 4, generator=torch.Generator().manual_seed(5)))
WARNING = "the Triton kernels fail their self-test on cpu"


@pytest.fixture(autouse=True)
def process_that_has_tested_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "auto" treat the CPU as a GPU, with no kind of call tested yet."""
    skip_unless_built("triton")
    monkeypatch.setattr(dispatch, "is_gpu", lambda x: True)
    monkeypatch.setattr(self_test, "_VERDICTS", {})
    monkeypatch.setattr(self_test, "_SWITCH", "1")
    torch._dynamo.reset()


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """The kinds of calls whose self-test is requested; all pass without being run."""
    kinds: list[Kind] = []
    monkeypatch.setattr(self_test, "self_test_fault", lambda kind: kinds.append(kind))
    return kinds


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels by ones that do not compile."""

    def kernels() -> None:
        raise RuntimeError("PassManager::run failed\nand more about it")

    monkeypatch.setattr(launch, "kernels", kernels)


def inputs(dtype: torch.dtype = torch.float32, size: int = 8, window: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(2, 5, 3, size, generator=generator).to(dtype).requires_grad_() for _ in "kv")
    alpha, beta = (torch.randn(3, window, generator=generator).requires_grad_() for _ in "kv")
    return {"k": k, "v": v, "alpha": alpha, "beta": beta}


def rotated(backend: str = "auto", **given: Any) -> tuple:
    return shift_norm_rope(given["k"].detach(), **given, rotary=ROTARY, keep_state=False, backend=backend)[:3]


def path(call: Callable[[], Any]) -> str:
    """Return which implementation shifts in a call: "triton" or "plain"."""
    launched = []
    real = launch.kernels

    def kernels() -> SimpleNamespace:
        launched.append(1)
        return real()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "kernels", kernels)
        call()
    return "triton" if launched else "plain"


# The first call


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "kind",
    [
        Kind(CPU, torch.float16, 6, 3, 2),
        Kind(CPU, torch.float64, 6, 6, 1, rotated=True),
        Kind(CPU, torch.float32, 6, 6, 8, rotated=True, normed=True),
        Kind(CPU, torch.bfloat16, 64, 64, 2, rotated=True),
        Kind(CPU, torch.bfloat16, 5, 7, 3),
    ],
    ids=str,
)
def test_kernels_that_are_right_pass(kind):
    assert self_test.self_test_fault(kind) is None


@pytest.mark.interpreted
def test_auto_takes_kernels_that_are_right():
    assert path(lambda: kv_shift(**inputs())) == "triton"
    assert list(self_test._VERDICTS.values()) == [True]
    assert all(map(torch.equal, kv_shift(**inputs())[:2], kv_shift(**inputs(), backend="triton")[:2]))


def test_each_kind_is_tested_once(tested):
    for _ in range(2):
        kv_shift(**inputs())
        kv_shift(**inputs(torch.bfloat16))
        shift_tokens(inputs(size=5, window=3)["k"], inputs(window=3)["alpha"])
        rotated(**inputs())
        norms = nn.RMSNorm(8), nn.RMSNorm(8)
        shift_norm_rope(inputs()["k"].detach(), **inputs(), rotary=ROTARY, norms=norms)
        shift_norm_rope(None, inputs()["k"], inputs()["v"], None, None, rotary=ROTARY)
    assert tested == [
        Kind(CPU, torch.float32, 8, 8, 2),
        Kind(CPU, torch.bfloat16, 8, 8, 2),
        Kind(CPU, torch.float32, 5, 5, 3),
        Kind(CPU, torch.float32, 8, 8, 2, rotated=True),
        Kind(CPU, torch.float32, 8, 8, 2, rotated=True, normed=True),
        Kind(CPU, torch.float32, 8, 8, 1, rotated=True),
    ]


def test_nothing_is_tested_where_kernels_are_not_used(tested, monkeypatch):
    for backend in ("triton", "eager", "reference"):
        kv_shift(**inputs(), backend=backend)
        rotated(backend, **inputs())
    kv_shift(**inputs(window=9))  # too wide for the kernels
    monkeypatch.setattr(dispatch, "is_gpu", lambda x: x.is_cuda)
    kv_shift(**inputs())
    rotated(**inputs())
    assert tested == []


# Faulty kernels


def test_kernels_that_raise_are_left_with_one_warning(broken):
    with pytest.warns(RuntimeWarning, match=WARNING) as warned:
        shifted = kv_shift(**inputs())
    rotated(**inputs())
    assert path(lambda: kv_shift(**inputs(torch.bfloat16))) == "plain"
    [message] = [str(warning.message) for warning in warned]
    assert "(float32, head size 8, window 2): RuntimeError: PassManager::run failed." in message
    assert "and more" not in message
    assert "`kvshift doctor`" in message
    assert "KVSHIFT_SELF_TEST=0" in message
    assert all(map(torch.equal, shifted[:2], kv_shift(**inputs(), backend="eager")[:2]))


def test_one_kind_that_is_wrong_ends_the_use_of_all(monkeypatch):
    monkeypatch.setattr(self_test, "self_test_fault", lambda kind: "off" if kind.dtype == torch.float16 else None)
    assert path(lambda: kv_shift(**inputs())) == "triton"
    with pytest.warns(RuntimeWarning, match=WARNING):
        assert path(lambda: kv_shift(**inputs(torch.float16))) == "plain"
    assert path(lambda: kv_shift(**inputs())) == "plain"
    assert path(lambda: rotated(**inputs())) == "plain"


def test_a_warning_that_is_an_error_is_raised_once(broken):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(RuntimeWarning, match=WARNING):
            kv_shift(**inputs())
        kv_shift(**inputs())


def test_who_asks_for_triton_gets_it(broken):
    for call in (lambda: kv_shift(**inputs(), backend="triton"), lambda: rotated("triton", **inputs())):
        with pytest.raises(RuntimeError, match="PassManager"):
            call()


# Mutants that change results by rounding only, or that change a kernel that "auto" does not launch.
UNSEEN = {
    "rounded twice",
    "next state of every fourth row",
    *(name for name, mutant in MUTANTS.items() if mutant.file == PLAIN),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MUTANTS.keys() - UNSEEN))
def test_a_mutant_is_noticed(name, tmp_path):
    given, norms = inputs(window=3), (nn.RMSNorm(8), nn.RMSNorm(8))

    def first_calls() -> None:
        shift_norm_rope(given["k"].detach(), **given, rotary=ROTARY, norms=norms)
        kv_shift(**given)

    with MUTANTS[name].in_place(tmp_path):
        with pytest.warns(RuntimeWarning, match=WARNING):
            first_calls()
        assert path(lambda: kv_shift(**given)) == "plain"
        assert all(map(torch.equal, kv_shift(**given)[:2], kv_shift(**given, backend="eager")[:2]))


@pytest.mark.interpreted
def test_one_mutant_is_noticed_by_the_first_call(tmp_path):
    """The self-test also covers gradients and documents, which the call does not use."""
    with MUTANTS["gradient across documents"].in_place(tmp_path), torch.no_grad():
        with pytest.warns(RuntimeWarning, match=r"packed documents: gradient of k: \d+ of"):
            shifted = kv_shift(**inputs())
        assert all(map(torch.equal, shifted[:2], kv_shift(**inputs(), backend="eager")[:2]))


# The switch


@pytest.mark.parametrize("value", ["", "no", "2"])
def test_a_switch_that_is_neither_0_nor_1_is_refused(value, monkeypatch):
    monkeypatch.setattr(self_test, "_SWITCH", value)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"KVSHIFT_SELF_TEST must be 0 or 1; got '{value}'"):
            kv_shift(**inputs())


def test_switched_off_it_tests_nothing(broken, monkeypatch):
    monkeypatch.setattr(self_test, "_SWITCH", "0")
    with pytest.raises(RuntimeError, match="PassManager"):
        kv_shift(**inputs())


# The context of the first call


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "hooks on saved tensors": lambda: saved_tensors_hooks(lambda x: pytest.fail("packed"), lambda x: x),
    "a default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "checkpoint": nullcontext,
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CONTEXTS)
def test_nothing_of_the_caller_reaches_the_test(name):
    given = {key: x.detach() for key, x in inputs().items()}
    before = torch.get_rng_state()

    def taken(*_: torch.Tensor) -> str:
        return path(lambda: kv_shift(**given))

    with CONTEXTS[name]():
        one = torch.ones(1, requires_grad=True)
        assert (checkpoint(taken, one, use_reentrant=False) if name == "checkpoint" else taken()) == "triton"
    assert torch.equal(torch.get_rng_state(), before)


def test_a_first_call_in_backward_is_plain_and_tests_nothing(tested):
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            paths.append(path(lambda: kv_shift(**{name: x.detach() for name, x in inputs().items()})))
            return grads[0]

    paths: list[str] = []
    for _ in range(2):
        Backward.apply(torch.ones(2, requires_grad=True)).sum().backward()
        kv_shift(**inputs())
    assert paths == ["plain", "triton"]
    assert len(tested) == 1


def test_a_first_call_in_a_captured_graph_is_plain_and_tests_nothing(tested, monkeypatch):
    kind = Kind(torch.device("cuda", 0), torch.bfloat16, 8, 8, 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not self_test.passes_self_test(kind)
    assert (tested, self_test._VERDICTS) == ([], {})


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiler_tests_while_it_traces(dynamic, tested):
    compiled = torch.compile(rotated, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert path(lambda: compiled(**inputs())) == "triton"
    assert tested == [Kind(CPU, torch.float32, 8, 8, 2, rotated=True)]
    assert path(lambda: compiled(**inputs())) == "triton"


@pytest.mark.slow
@pytest.mark.interpreted
def test_the_test_inside_a_compiler_is_the_real_one(broken):
    compiled = torch.compile(rotated, backend="aot_eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="PassManager"):
        results = compiled(**inputs())
    torch.testing.assert_close(results, rotated("eager", **inputs()))


# Small calls


def test_a_difference_says_where_and_how_much():
    exact = {"k": torch.tensor([[1.0, 2, torch.inf]], dtype=torch.float64)}
    assert difference({"k": torch.tensor([[1.0, 2 + 2e-4, torch.inf]])}, exact, torch.float32) is None
    for wrong, said in (
        ([[1.0, 2.001, torch.inf]], r"k: 1 of 3 elements are off, the first at \(0, 1\): 2.001, not 2"),
        ([[1.0, torch.nan, torch.inf]], "nan, not 2"),
        ([[1.0, 2.0, 3.0]], "3, not inf"),
        ([[1.0, 2.0]], r"k is of shape \(1, 2\), not \(1, 3\)"),
    ):
        assert re.search(said, str(difference({"k": torch.tensor(wrong)}, exact, torch.float32)))
