"""Tracers, function transforms, forward-mode AD and batched gradients give the results of the reference.

This holds for every backend that a caller can request; `kvshift.ops.torch_ops.shift_traceable` handles all such calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from kvshift.ops import ShiftState, shift_tokens

from .cases import Case, random_case
from .conftest import skip_unless_built

MODES: dict[str, dict] = {
    "state": {"rows": 3},
    "window 3": {"window": 3},
    "pack, state": {"lengths": [0, 2, 1], "rows": 1},
    "documents, padding": {"batch": 1, "positions": 5, "seq_idx": [[0, 0, 0, 1, 1]], "mask": [[0, 1, 1, 0, 1]]},
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
Function = Callable[..., tuple[Tensor, ...]]


@pytest.fixture(params=["auto", "cpu", "eager", "triton"])
def asked(request: pytest.FixtureRequest) -> str:
    """The requested backend: any but the reference."""
    skip_unless_built(request.param)
    return request.param


def small(mode: dict) -> Case:
    """Return a small call in fp64, with one coefficient of zero and one lag that is zero for a whole head."""
    shape = {"batch": 1, "positions": 3, "heads": 2, "k_dim": 2, "v_dim": 1} | mode
    case = random_case(2, dtype=torch.float64, coefficient_dtype=torch.float64, **shape)
    case.alpha[1, -1] = 0
    case.beta[0, 0] = 0
    return case


def function_of(case: Case, backend: str) -> tuple[Function, tuple[Tensor, ...]]:
    """Return the call as a function of its floating-point tensors, and these tensors."""

    def call(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        state = ShiftState(*rows, case.state.max_rows) if case.state is not None else None
        k_hat, v_hat, new = replace(case, k=k, v=v, alpha=alpha, beta=beta, state=state).call(backend)
        return k_hat, v_hat, new.k, new.v

    rows = () if case.state is None else (case.state.k, case.state.v)
    return call, (case.k, case.v, case.alpha, case.beta, *rows)


def assert_same(results: Any, expected: Any) -> None:
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("how", "mode"), [*(("jit", mode) for mode in MODES.values()), ("fx", MODES["pack, state"])], ids=[*MODES, "fx"]
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_a_trace_computes_what_the_call_does_on_other_numbers(mode, how, asked):
    function, inputs = function_of(small(mode), asked)
    others = tuple(2 * x + 1 for x in inputs)
    if how == "jit":
        traced = torch.jit.trace(function, inputs, check_trace=False)
    else:
        traced = make_fx(lambda *tensors: function(*tensors))(*inputs)
    expected, _ = function_of(small(mode), "reference")
    assert_same(tuple(traced(*others)), expected(*others))


@modes
def test_jacobians_of_every_kind_are_those_of_the_reference(mode, asked):
    """Computed by function transforms and through batches of gradients."""
    function, inputs = function_of(small(mode), asked)
    reference, _ = function_of(small(mode), "reference")
    expected = torch.autograd.functional.jacobian(reference, inputs)
    every = tuple(range(len(inputs)))
    assert_same(torch.func.jacrev(function, argnums=every)(*inputs), expected)
    assert_same(torch.autograd.functional.jacobian(function, inputs, vectorize=True), expected)


@modes
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch itself uses torch.jit.script
def test_tangents_are_those_of_the_reference(mode, asked):
    function, inputs = function_of(small(mode), asked)
    reference, _ = function_of(small(mode), "reference")
    generator = torch.Generator().manual_seed(3)
    tangents = tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs)
    expected = torch.autograd.functional.jvp(reference, inputs, tangents)[1]
    with forward_ad.dual_level():
        outputs = function(*map(forward_ad.make_dual, inputs, tangents))
        assert_same(tuple(forward_ad.unpack_dual(y).tangent for y in outputs), expected)
    assert_same(torch.func.jvp(function, inputs, tangents)[1], expected)


@modes
def test_gradients_of_each_sample(mode, asked):
    """Per-sample gradients with shared coefficients by `vmap(grad)`, as in differential privacy."""
    case = small(mode)
    generator = torch.Generator().manual_seed(5)
    samples = torch.randn(3, *case.k.shape, generator=generator, dtype=case.k.dtype)

    def loss_of(backend: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        function, (_, v, _, _, *rows) = function_of(case, backend)
        return lambda alpha, beta, k: sum(y.square().sum() for y in function(k, v, alpha, beta, *rows))

    each = torch.func.vmap(torch.func.grad(loss_of(asked), argnums=(0, 1, 2)), in_dims=(None, None, 0))
    results = each(case.alpha, case.beta, samples)
    for i, k in enumerate(samples):
        leaves = [x.clone().requires_grad_() for x in (case.alpha, case.beta, k)]
        expected = torch.autograd.grad(loss_of("reference")(*leaves), leaves)
        assert_same(tuple(x[i] for x in results), expected)


@pytest.mark.parametrize("what", ["mask", "seq_idx", "state", "coefficients"])
def test_vmap_over_one_argument(what, asked):
    case = small({"positions": 5, "rows": 1, "mask": [[0, 1, 1, 0, 1]], "seq_idx": [[0, 0, 1, 1, 1]]})
    generator = torch.Generator().manual_seed(7)
    given = {
        "mask": torch.rand(3, *case.k.shape[:2], generator=generator) < 0.6,
        "seq_idx": torch.randint(2, (3, *case.k.shape[:2]), generator=generator),
        "state": torch.randn(3, *case.state.k.shape, generator=generator, dtype=case.k.dtype),
        "coefficients": torch.randn(3, *case.alpha.shape, generator=generator, dtype=case.k.dtype),
    }[what]

    def call(x: Tensor, backend: str = asked) -> tuple[Tensor, ...]:
        changed: dict[str, Any] = {what: x}
        if what == "state":
            changed = {"state": replace(case.state, k=x)}
        elif what == "coefficients":
            changed = {"alpha": x}
        k_hat, v_hat, new = replace(case, **changed).call(backend)
        return k_hat, v_hat, new.k, new.v

    results = torch.func.vmap(call)(given)
    for i, x in enumerate(given):
        assert_same(tuple(y[i] for y in results), call(x, "reference"))


@modes
def test_plain_operations_give_the_bits_of_eager(mode):
    for dtype in (torch.float32, torch.bfloat16):
        case = random_case(11, **{"batch": 1, "dtype": dtype} | mode)
        (function, inputs), (expected, _) = function_of(case, "auto"), function_of(case, "eager")
        results = torch.func.vmap(function)(*(x.unsqueeze(0) for x in inputs))
        for result, bits in zip(results, expected(*inputs), strict=True):
            assert torch.equal(result.squeeze(0), bits)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["auto", "eager"])
@pytest.mark.usefixtures("nothing_compiled_before")
def test_a_compiled_transform_is_taken_apart(asked):
    case = small(MODES["state"])

    def gradient(k: Tensor) -> Tensor:
        return torch.func.grad(lambda k: shift_tokens(k, case.alpha, backend=asked)[0].square().sum())(k)

    compiled = torch.compile(torch.func.vmap(gradient), backend="eager", fullgraph=True)
    samples = torch.stack([case.k, 2 * case.k])
    assert_same(compiled(samples), torch.stack([gradient(k) for k in samples]))
