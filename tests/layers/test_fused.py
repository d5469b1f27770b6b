"""Shift, QK-norm and RoPE in one launch, called through layers; tests/ops has the tests of the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvshift import KVShift, ShiftOptions
from kvshift.layers import recompute
from kvshift.layers.attention import HeadNorm
from kvshift.ops import attention_inputs, dispatch
from kvshift.ops.rope import half_tables
from kvshift.ops.triton.call import triton_unsupported_reason
from tests.layers.attention_cases import ATTENTION, GQA, MHA, VARIED, make, outcome, same_bits, tokens

pytestmark = pytest.mark.interpreted

B, T, H, G, D, DV = 2, 5, 5, 3, 6, 7
LONG = pytest.mark.slow
HOLES = torch.tensor([[False, True, False, True, True], [True, True, True, False, False]])
NUMBERS = torch.tensor([[0, 0, 1, 1, 1], [7, -1, -1, -1, 7]])


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

    for module in (attention_inputs, recompute):
        monkeypatch.setattr(module, "fused_path", counting)
    return counted


def normal(*size: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layer_of(options: dict[str, Any]) -> KVShift:
    layer: KVShift = KVShift(G, ShiftOptions(**options), num_heads=H)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=100 + i))
    return layer


def norms_of(dtype: torch.dtype = torch.float64, eps: float | None = 0.25) -> tuple[nn.Module, nn.Module]:
    norms = [nn.RMSNorm(D, eps=eps, dtype=dtype) for _ in range(2)]
    with torch.no_grad():
        for i, norm in enumerate(norms):
            norm.weight.copy_(normal(D, seed=200 + i))
    return norms[0], norms[1]


def table_of(width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    cos, sin = (normal(1, T, D // 2, seed=seed, dtype=dtype) for seed in (300, 301))
    if width == D // 2:
        return cos.unsqueeze(2), sin.unsqueeze(2)
    return half_tables(cos.repeat(1, 1, 2), sin.repeat(1, 1, 2))


def inputs_of(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [normal(B, T, *head, seed=400 + i, dtype=dtype) for i, head in enumerate(((H, D), (G, D), (G, DV)))]


def outcome_of(layer: KVShift, inputs: list[Tensor], backend: Any, **options: Any) -> dict[str, Tensor]:
    """Return results, new state, and the gradients of everything that is trained."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    modules = [layer, *(options.get("norms") or ())]
    leaves = [*inputs, *(p for module in modules for p in module.parameters() if p.requires_grad)]
    q, k, v, new = layer(*inputs, backend=backend, **options)
    results = {"q": q, "k": k, "v": v}
    if new is not None:
        results |= {"new.k": new.k, "new.v": new.v} | ({} if new.q is None else {"new.q": new.q})
    upstream = [normal(*x.shape, seed=500 + i).to(x.dtype) for i, x in enumerate(results.values())]
    pairs = [(x, grad) for x, grad in zip(results.values(), upstream, strict=True) if x.requires_grad]
    ys, grads = zip(*pairs, strict=True)
    given = torch.autograd.grad(ys, leaves, grads, allow_unused=True, materialize_grads=True)
    results |= {f"gradient {i}": grad for i, grad in enumerate(given)}
    return {name: x.detach() for name, x in results.items()}


def assert_equal(layer: KVShift, inputs: list[Tensor], **options: Any) -> None:
    """Compare in fp64 up to 1e-12; gradients of the coefficients, which are float32, up to their rounding."""
    own, expected = outcome_of(layer, inputs, "triton", **options), outcome_of(layer, inputs, "reference", **options)
    assert own.keys() == expected.keys()
    for name, x in own.items():
        rtol = 2.0**-23 if x.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(x, expected[name], rtol=rtol, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# KVShift


@pytest.mark.parametrize("where", [{}, {"mask": HOLES, "seq_idx": NUMBERS}], ids=["plain", "documents, padding"])
@pytest.mark.parametrize(
    "options", [{"constraint": "gate"}, {"constraint": "clamp", "window": 4}, {"targets": ("q", "k", "v")}], ids=str
)
def test_results_state_and_gradients(options, where, launches):
    width = D // 2 if where else D
    assert_equal(layer_of(options), inputs_of(), **where, rotary=table_of(width), norms=norms_of())
    assert launches[0] == ("targets" not in options)


# Norms that are not fused


def hooked() -> nn.Module:
    norm = norms_of()[0]
    norm.register_forward_hook(lambda _module, _args, out: out.mul(2))
    return norm


def replaced() -> nn.Module:
    norm = norms_of()[0]
    norm.forward = lambda x: 2 * x
    return norm


OTHER_NORMS = {
    "another eps": lambda: norms_of(eps=0.5)[0],
    "no gain": lambda: nn.RMSNorm(D, eps=0.25, elementwise_affine=False),
    "layer norm": lambda: nn.LayerNorm(D, eps=0.25, dtype=torch.float64),
    "no parameters": lambda: nn.Identity(),
    "hook": hooked,
    "forward replaced": replaced,
}


@pytest.mark.parametrize("first", [False, True], ids=["of keys", "of queries"])
@pytest.mark.parametrize("name", OTHER_NORMS)
def test_other_norms_are_applied_as_they_are(name, first, launches):
    pair = (norms_of()[0], OTHER_NORMS[name]())
    assert_equal(layer_of({}), inputs_of(), rotary=table_of(D), norms=pair[::-1] if first else pair)
    assert launches[0] == 0


@pytest.mark.parametrize("eps", [None, 1e-5])
def test_the_default_eps_is_that_of_the_dtype(eps, launches):
    inputs = [x * 1e-8 for x in inputs_of()]
    assert_equal(layer_of({}), inputs, rotary=table_of(D), norms=norms_of(eps=eps))
    assert launches[0] == 1


def test_norms_in_float32_of_smaller_heads(launches):
    """Autocast leaves the norms in float32, so their gains and gradients are float32, too."""
    norms = tuple(HeadNorm(D, eps=0.25) for _ in range(2))
    finish = {"rotary": table_of(D, dtype=torch.bfloat16), "norms": norms}
    inputs = inputs_of(dtype=torch.bfloat16)
    own, expected = (outcome_of(layer_of({}), inputs, backend, **finish) for backend in ("triton", "reference"))
    assert launches[0] == 1
    for name, x in own.items():
        assert x.dtype == expected[name].dtype
        torch.testing.assert_close(x, expected[name], rtol=0.02, atol=0.02 * float(expected[name].abs().max()))


def test_tables_that_are_trained_get_their_gradients(launches):
    table = tuple(x.requires_grad_() for x in table_of(D // 2))
    q, k, *_ = layer_of({})(*inputs_of(), rotary=table, backend="triton")
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


@pytest.mark.parametrize("where", ATTENTION)
@pytest.mark.parametrize(("heads", "dtype"), [(MHA, torch.float64), (GQA, torch.bfloat16)], ids=["mha", "gqa"])
def test_what_backward_recomputes_has_the_same_bits(heads, dtype, where, launches, monkeypatch):
    monkeypatch.setattr(dispatch, "_AUTO", "triton")
    monkeypatch.setattr(recompute, "_MIN_ELEMENTS", {"cpu": 0})
    layer = make(heads, dtype=dtype, qk_norm=True)
    x = tokens(1 if where == "cu_seqlens" else 2, 11, dtype=dtype)

    recomputed = outcome(layer, x, **ATTENTION[where])
    assert launches[0] == 2  # forward, and the recomputation of backward
    with monkeypatch.context() as patch:
        patch.setattr(recompute, "may_recompute", lambda *modules: False)
        same_bits(recomputed, outcome(layer, x, **ATTENTION[where]))
    assert launches[0] == 3


@pytest.mark.parametrize("frozen", ["alpha", "beta", "k_norm"])
def test_what_is_frozen_is_left_out_of_it(frozen, launches, monkeypatch):
    monkeypatch.setattr(dispatch, "_AUTO", "triton")
    layer, x = make(GQA, qk_norm=True), tokens(2, 5)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(frozen not in name)
    results = []
    for limit in (0, 2**20):
        monkeypatch.setattr(recompute, "_MIN_ELEMENTS", {"cpu": limit})
        results.append(outcome(layer, x))
    assert launches[0] == 3
    same_bits(*results)
