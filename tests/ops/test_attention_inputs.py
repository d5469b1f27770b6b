"""Every path of shift + QK-norm + RoPE gives the reference's results, new state and gradients of all inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvshift.ops import ShiftState, attention_inputs, kv_shift
from kvshift.ops.attention_inputs import Results, shift_norm_rope

from ..covering import covering
from .cases import DTYPES
from .conftest import skip_unless_built
from .fused_cases import (
    HOLES,
    LEAVES,
    MODES,
    NOTHING,
    WITH_STATE,
    FusedCase,
    by_loops,
    fused,
    outcome,
    random_fused,
    without_state,
)
from .fused_rounding import assert_within_rounding

Call = Callable[..., Results]

QUERIES_TOO: dict[str, dict] = {
    "queries too": {"shifted": "qkv"},
    "queries alone": {"shifted": "q", "window": 3},
    "queries too, pack": {"shifted": "qkv", "lengths": [2, 0, 1, 3]},
    "queries too, padding": {"shifted": "qkv", "mask": HOLES},
}
OF_THE_LAUNCH = {
    "plain",
    "heads of two",
    "no queries",
    "one token",
    "documents, padding",
}  # triton/test_fused.py tests the rest
BACKENDS = {"launch": "triton", "auto": "auto", "cpu": "cpu", "eager": "eager", "plain operations": "auto"}


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """The paths that calls of `shift_norm_rope` take, except those of the reference."""
    paths = []

    def record(*call: Any, real: Callable = attention_inputs.fused_path) -> str:
        path = real(*call)
        paths.extend([path] if path != "reference" else [])
        return path

    monkeypatch.setattr(attention_inputs, "fused_path", record)
    return paths


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in ("cpu", "eager") else ()) for name in BACKENDS]
)
def path(request: pytest.FixtureRequest) -> str:
    """On a CPU, "auto" uses the kernels of "cpu"; explicit "cpu" and "eager" are therefore left to `make test-slow`."""
    skip_unless_built(BACKENDS[request.param])
    return request.param


def by(path: str, **options: Any) -> Call:
    """Return a function that computes a case on this path, with these options of `fused`."""

    def call(case: FusedCase) -> Results:
        if path == "plain operations":
            with forward_ad.dual_level():  # forward-mode AD needs traceable operations
                return fused(case, BACKENDS[path], **options)
        return fused(case, BACKENDS[path], **options)

    return call


def assert_like_the_loops(case: FusedCase, call: Call) -> None:
    """Compare all results and gradients with the reference; if the case has states, also new states, in fp64."""
    if case.k_state is None:
        unit = torch.finfo(case.k.dtype).eps  # autograd needs up to twice as many operations for norm and rotation
        assert_within_rounding(case, lambda case: call(case)[:3], unit=unit)
        return
    gradients = "gradient of k_state" in (found := outcome(case, call, gradients=torch.is_grad_enabled()))
    expected = outcome(case, by_loops, gradients=gradients)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        if name.startswith("new state"):
            assert torch.equal(x, expected[name]), name
        rtol = 2.0**-23 if x.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(x, expected[name], rtol=rtol, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("mode", [*MODES, *QUERIES_TOO])
def test_results_and_gradients(mode, path, taken):
    """Full-width and half-width tables alternate, and so do norms: "cpu" has a norm where "auto" has none."""
    shape = (MODES | QUERIES_TOO)[mode]
    launches = path == "launch" and mode not in QUERIES_TOO
    if launches and mode not in OF_THE_LAUNCH:
        pytest.skip("triton/test_fused.py has it")
    number = list(MODES | QUERIES_TOO).index(mode)
    norm = (number + list(BACKENDS).index(path)) % 2 == 0
    dtype = torch.float32 if "fp32" in mode else DTYPES[(number + norm) % 2]
    case = random_fused(2, dtype=dtype, norm=norm, **shape)
    assert_like_the_loops(case, by(path, full_tables=bool(number // 2 % 2)))
    assert taken == ["launch" if launches else "unfused"]


@pytest.mark.parametrize("mode", [*WITH_STATE, "queries too"])
def test_states(mode, path, taken):
    """Gradients through old and new states need the unfused path; without gradients, the launch handles states."""
    shape = (WITH_STATE | {"queries too": {"shifted": "qkv", "window": 3, "rows": 3}})[mode]
    case = random_fused(3, dtype=torch.float64, **shape)
    assert_like_the_loops(case, by(path))
    with torch.no_grad():
        assert_like_the_loops(case, by(path, full_tables=True))
    assert taken == ["unfused", "launch" if path == "launch" and mode != "queries too" else "unfused"]


@pytest.mark.parametrize("mode", NOTHING)
@pytest.mark.parametrize("rows", [None, 2], ids=["fresh", "state"])
def test_no_token(mode, rows, path):
    assert_like_the_loops(random_fused(5, dtype=torch.float64, rows=rows, **NOTHING[mode]), by(path))


@pytest.mark.parametrize("mode", [{}, {"mask": HOLES}], ids=["plain", "padding"])
def test_norms_of_llama(mode, path, taken):
    """Llama's norm computes in fp32 for every input dtype."""
    assert_like_the_loops(random_fused(11, **mode), by(path, kind=LlamaRMSNorm))
    assert taken == ["launch" if path == "launch" else "unfused"]


@covering(dtype=DTYPES, shifted=["kv", "k", "v", ""], norm={"no norm": False, "norm": True})
@torch.no_grad()
def test_the_next_token(dtype, shifted, norm, taken):
    """Without boundaries or gradients, decoding uses plain operations, each of which rounds."""
    case = random_fused(13, 3, 1, dtype=dtype, norm=norm, shifted=shifted, rows=1, tables=3)
    for full_tables in (False, True):
        call = by("auto", full_tables=full_tables)
        assert_within_rounding(case, lambda case, call=call: call(case)[:3], unit=torch.finfo(dtype).eps)
        assert call(case)[3] == by_loops(case)[3]
    assert set(taken) == {"next token"}


@covering(dtype=DTYPES, shifted=["kv", "k", "v"])
@torch.no_grad()
def test_the_next_token_of_families_that_rotate_themselves(dtype, shifted, taken):
    """Without rotary embedding, the next token has the bits of `kv_shift`."""
    case = random_fused(23, 3, 1, dtype=dtype, norm=False, shifted=shifted, rows=1)
    state = ShiftState(case.k_state, case.v_state, 1)
    q, *found = shift_norm_rope(case.q, case.k, case.v, case.alpha, case.beta, state=state)
    expected = kv_shift(case.k, case.v, case.alpha, case.beta, state=state)
    assert q is case.q
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(x, y)
    assert found[2] == expected[2]
    assert taken == ["next token"]


def test_the_padding_of_the_last_token_is_no_state(path):
    """The state is taken at the last real token; the padding after it has no effect, even NaN."""
    case = random_fused(17, dtype=torch.float64, mask=HOLES, rows=1)
    assert case.mask is not None
    padding = ~case.mask[:, :, None, None]
    case = replace(case, k=case.k.masked_fill(padding, torch.nan), v=case.v.masked_fill(padding, torch.nan))
    with torch.no_grad():
        assert_like_the_loops(case, by(path))


def test_windows_that_differ_are_refused(path):
    case = random_fused(19)
    with pytest.raises(ValueError, match=r"alpha and beta must have the same shape; .* beta is \(3, 3\)"):
        by(path)(replace(case, beta=torch.zeros(3, 3)))


# Compilation and batched gradients


COMPILED = {"plain": {}, "documents, padding": MODES["documents, padding"], "pack, window 4": MODES["pack, window 4"]}
COMPILED |= {"queries too": QUERIES_TOO["queries too"], "no queries": MODES["no queries"]}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["launch", "auto"])
@pytest.mark.parametrize(
    "mode", [pytest.param(x, marks=() if x == "documents, padding" else pytest.mark.slow) for x in COMPILED]
)
@pytest.mark.filterwarnings(r"ignore:<class 'torch\.autograd\.function\.Function'>:DeprecationWarning")
@pytest.mark.usefixtures("nothing_compiled_before")
def test_compiled(mode, path):
    skip_unless_built(BACKENDS[path])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(shift_norm_rope, backend=counter, fullgraph=True)
    case = random_fused(19, dtype=torch.float64, **COMPILED[mode])
    assert_like_the_loops(case, by(path, op=compiled, keep_state=False))
    assert counter.frame_count == 1


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("mode", ["plain", "pack, padding", "documents, padding", "values alone"])
def test_batches_of_gradients(mode, norm, path):
    """Batches of gradients reach the backward of the path that ran forward, which then uses plain operations."""
    case = random_fused(23, dtype=torch.float64, norm=norm, **MODES[mode])
    leaves = {name: x.requires_grad_() for name in LEAVES if (x := getattr(case, name)) is not None}
    expected = outcome(case, without_state)
    batches = [torch.stack([grad, 2 * grad]) for grad in case.grads]
    results = cast(tuple[Tensor, ...], by(path)(case)[:3])
    found = torch.autograd.grad(results, list(leaves.values()), batches, is_grads_batched=True)
    for name, batch in zip(leaves, found, strict=True):
        exact = expected[f"gradient of {name}"]
        rtol = 2.0**-22 if exact.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(batch, torch.stack([exact, 2 * exact]), rtol=rtol, atol=1e-12)
