"""Layers give the same results under tracers, function transforms and batches of gradients as without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvshift.layers import KVShift, KVShiftAttention
from kvshift.layers.positions import rotary_table
from kvshift.ops import ShiftState, dispatch
from tests.covering import covering
from tests.layers.attention_cases import with_shift_options

BACKENDS = ("auto", "cpu", "eager", "triton")
B, T, H, G, D = 2, 3, 4, 2, 4


@pytest.fixture(params=BACKENDS)
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend that "auto" stands for, as set by KVSHIFT_BACKEND."""
    monkeypatch.setattr(dispatch, "_AUTO", request.param)
    return request.param


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(seed: int = 3, **options: Any) -> KVShiftAttention:
    layer = KVShiftAttention(8, H, G, head_dim=D, dtype=torch.float64, **with_shift_options(options))
    for parameter in layer.parameters():
        parameter.data = normal(seed, *parameter.shape)
    return layer


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # from PyTorch's attention
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"shift_targets": ("q", "k", "v")}], ids=str)
def test_gradients_of_each_sample_are_those_of_each_alone(options, asked):
    """Per-sample gradients by `vmap(grad)` are complete and equal those of each sample alone."""
    layer = make(**options)
    parameters = dict(layer.named_parameters())
    samples = normal(5, B, T, 8)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(layer, parameters, (sample[None],))[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, samples)
    for i, sample in enumerate(samples):
        alone = torch.autograd.grad(loss(parameters, sample), list(parameters.values()))
        for name, gradient in zip(parameters, alone, strict=True):
            torch.testing.assert_close(each[name][i], gradient, rtol=1e-10, atol=1e-10)


@covering(
    options=[{}, {"qk_norm": True}, {"shift_targets": ("q", "k", "v")}],
    bounded={"": False, "padding and documents": True},
)
def test_second_derivatives_are_those_of_transforms(options, bounded, asked):
    """The gradient of a gradient penalty is taken for one tensor at a time, since autograd prunes the graph."""
    layer = make(**options)
    where: dict[str, Any] = {}
    if bounded:
        where["mask"] = torch.tensor([[False, True, True], [True, True, True]])
        where["seq_idx"] = torch.tensor([[0, 0, 0], [0, 0, 1]])
    inputs = {"x": normal(5, B, T, 8).requires_grad_(), **dict(layer.named_parameters())}

    def loss(inputs: dict[str, Tensor]) -> Tensor:
        parameters = {name: tensor for name, tensor in inputs.items() if name != "x"}
        return functional_call(layer, parameters, (inputs["x"],), where)[0].pow(3).sum()

    def penalty(inputs: dict[str, Tensor]) -> Tensor:
        gradients = torch.func.grad(loss)(inputs)
        return sum(gradient.square().sum() for gradient in gradients.values())

    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's other implementations have no second derivative
        expected = torch.func.grad(penalty)(inputs)
        for name, tensor in inputs.items():
            first = torch.autograd.grad(loss(inputs), list(inputs.values()), create_graph=True)
            (second,) = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tensor)
            torch.testing.assert_close(second, expected[name], rtol=1e-8, atol=1e-8, msg=name)


def test_tangents_reach_keys_and_values_of_a_layer(asked):
    layer = make()
    x, tangent = normal(5, B, T, 8), normal(7, B, T, 8)
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):  # the others have no tangents
        out, _ = layer(forward_ad.make_dual(x, tangent))
        result = forward_ad.unpack_dual(out).tangent
    step = 1e-6
    difference = (layer(x + step * tangent)[0] - layer(x - step * tangent)[0]) / (2 * step)
    torch.testing.assert_close(result, difference, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("tokens", [T, 1])
def test_a_traced_layer_computes_what_the_layer_does(tokens, asked):
    """One token with a state is decoding, which takes a different path."""
    layer = KVShift(G).requires_grad_(False)
    rotary = rotary_table(torch.arange(tokens)[None], D, 100.0, torch.float32)

    def call(q: Tensor, k: Tensor, v: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        q, k, v, new = layer(q, k, v, state=ShiftState(*rows, 1), rotary=rotary)
        assert new is not None
        return q, k, v, new.k, new.v

    def inputs(seed: int) -> list[Tensor]:
        shapes = ((B, tokens, H, D), *[(B, tokens, G, D)] * 2, *[(B, 1, G, D)] * 2)
        return [normal(seed + i, *shape).float() for i, shape in enumerate(shapes)]

    with torch.no_grad():
        traced = torch.jit.trace(call, tuple(inputs(3)), check_trace=False)
        torch.testing.assert_close(traced(*inputs(17)), call(*inputs(17)))
