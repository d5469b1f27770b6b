"""Shift, QK-norm and RoPE in one launch: which norms it takes, and its results in `KVShiftAttention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvshift.layers.attention import HeadNorm
from kvshift.ops import attention_inputs, dispatch
from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.triton.call import triton_unsupported_reason
from tests.layers.attention_cases import ATTENTION, VARIED, make, tokens
from tests.ops.fused_cases import FusedCase, fused, random_fused
from tests.ops.fused_cases import outcome as outcome_of

pytestmark = pytest.mark.interpreted

LONG = pytest.mark.slow


@pytest.fixture(autouse=True)
def kernels_that_run() -> None:
    refusal = triton_unsupported_reason(torch.empty(0), 2)
    if refusal is not None:
        pytest.skip(refusal)


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """A list whose only number counts the calls that fuse shift and rotation into one launch."""
    counted = [0]

    def counting(*args, real=attention_inputs.fused_path):
        path = real(*args)
        counted[0] += path == "launch"
        return path

    monkeypatch.setattr(attention_inputs, "fused_path", counting)
    return counted


# Norms that are not fused


def norm(size: int) -> nn.Module:
    made = nn.RMSNorm(size, eps=0.25, dtype=torch.float64)
    with torch.no_grad():
        made.weight.copy_(torch.randn(size, generator=torch.Generator().manual_seed(9)))
    return made


def hooked(size: int) -> nn.Module:
    made = norm(size)
    made.register_forward_hook(lambda _module, _args, out: out.mul(2))
    return made


def replaced(size: int) -> nn.Module:
    made = norm(size)
    made.forward = lambda x: 2 * x
    return made


class Doubled(nn.RMSNorm):
    """A subclass with a formula of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


OTHER_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "another eps": lambda size: nn.RMSNorm(size, eps=0.5, dtype=torch.float64),
    "no gain": lambda size: nn.RMSNorm(size, eps=0.25, elementwise_affine=False),
    "layer norm": lambda size: nn.LayerNorm(size, eps=0.25, dtype=torch.float64),
    "no parameters": lambda size: nn.Identity(),
    "hook": hooked,
    "forward replaced": replaced,
    "forward of a subclass": lambda size: Doubled(size, eps=0.25, dtype=torch.float64),
}


def outcomes(case: FusedCase, **options: Any) -> list[dict[str, Tensor]]:
    """Return the results and gradients of a case by the kernels, and by the reference."""
    return [outcome_of(case, partial(fused, backend=backend, **options)) for backend in ("triton", "reference")]


def assert_equal(case: FusedCase, **options: Any) -> None:
    """Compare in fp64 up to 1e-12; gradients of the coefficients, which are float32, up to their rounding."""
    own, expected = outcomes(case, **options)
    for name, x in own.items():
        rtol = 2.0**-23 if x.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(x, expected[name], rtol=rtol, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_norms_are_called_where_a_hook_watches_all_modules(launches):
    case = random_fused(4, dtype=torch.float64, norm=False)
    pair = (norm(case.k.shape[3]), norm(case.k.shape[3]))
    called: list[nn.Module] = []

    def op(*args: Any, norms: None, **options: Any) -> Any:
        return shift_norm_rope(*args, norms=pair, **options)

    with nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module)):
        assert_equal(case, op=op)
    assert called == [*pair] * 2
    assert launches == [0]


@pytest.mark.parametrize("first", [False, True], ids=["of keys", "of queries"])
@pytest.mark.parametrize("name", OTHER_NORMS)
def test_other_norms_are_applied_as_they_are(name, first, launches):
    case = random_fused(4, dtype=torch.float64, norm=False)
    size = case.k.shape[3]
    pair = (norm(size), OTHER_NORMS[name](size))

    def op(*args: Any, norms: None, **options: Any) -> Any:
        return shift_norm_rope(*args, norms=pair[::-1] if first else pair, **options)

    assert_equal(case, op=op)
    assert launches[0] == 0


@pytest.mark.parametrize("eps", [None, 1e-5])
def test_the_default_eps_is_that_of_the_dtype(eps, launches):
    case = random_fused(4, dtype=torch.float64)
    small = {name: 1e-8 * getattr(case, name) for name in "qkv"}
    assert_equal(replace(case, eps=eps, **small))
    assert launches[0] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_default_eps_of_half_types_is_that_of_float32(dtype, launches):
    """As in PyTorch, which computes the norm in float32; the eps of the dtype itself would be seen in every digit."""
    case = random_fused(4, dtype=dtype)
    small = {name: 0.05 * getattr(case, name) for name in "qkv"}
    case = replace(case, eps=None, **small)
    own, reference, expected = (outcome_of(case, partial(fused, backend=b)) for b in ("triton", "reference", "eager"))
    assert launches[0] == 1
    for name, x in [*own.items(), *reference.items()]:
        torch.testing.assert_close(x, expected[name], rtol=0.02, atol=0.02 * float(expected[name].abs().max()))


def test_norms_in_float32_of_smaller_heads(launches):
    """Autocast leaves the norms in float32, so their gains and gradients are float32, too."""
    own, expected = outcomes(random_fused(4, dtype=torch.bfloat16, scale_dtype=torch.float32), kind=HeadNorm)
    assert launches[0] == 1
    for name, x in own.items():
        assert x.dtype == expected[name].dtype
        torch.testing.assert_close(x, expected[name], rtol=0.02, atol=0.02 * float(expected[name].abs().max()))


def test_tables_that_are_trained_get_their_gradients(launches):
    case = random_fused(4, dtype=torch.float64)
    table = case.cos.requires_grad_(), case.sin.requires_grad_()
    q, k, *_ = fused(case, "triton")
    assert all(grad.any() for grad in torch.autograd.grad(q.sum() + k.sum(), table))
    assert launches[0] == 0


# KVShiftAttention


def attend(layer: nn.Module, x: Tensor, where: dict[str, Tensor]) -> list[Tensor]:
    """Return the output, its gradients, the outputs of two decoding steps, and the cached keys and values."""
    x = x.clone().requires_grad_()
    out, state = layer(x, **where)
    wanted = [x, *layer.parameters()]
    grads = torch.autograd.grad((out * tokens(*out.shape[:2], seed=1)).sum(), wanted)
    following = []
    with torch.no_grad():
        state = state.detach()
        for seed in (2, 3):
            out_next, state = layer(tokens(state.sequences, 1, seed=seed), state=state)
            following.append(out_next)
    return [out.detach(), *grads, *following, state.k, state.v]


@pytest.mark.parametrize("where", ATTENTION)
@pytest.mark.parametrize(
    "options", ["rope-gqa-window-lags", *(pytest.param(x, marks=LONG) for x in ("rope", "rope-gate-queries"))]
)
def test_attention(options, where, launches, monkeypatch):
    layer, x = make(**VARIED[options]), tokens(1 if where == "cu_seqlens" else 2, 11)
    results = []
    for backend in ("triton", "reference"):
        monkeypatch.setattr(dispatch, "_AUTO", backend)
        results.append(attend(layer, x, ATTENTION[where]))
    for own, expected in zip(*results, strict=True):
        rtol = 1e-6 if own.dtype == torch.float32 else 1e-11
        torch.testing.assert_close(own, expected, rtol=rtol, atol=1e-11)
    assert launches[0] == (0 if options == "rope-gate-queries" else 3)
