"""Coefficients that another module owns: `torch.nn.utils.parametrize`, pruning, PEFT's adapters of parameters."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from kvshift.layers import (
    KVShift,
    KVShiftAttention,
    ShiftOptions,
    clamp_after_step,
    param_groups,
)
from tests.layers.attention_cases import run

B, T, E = 2, 7, 12


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def make() -> tuple[KVShiftAttention, Tensor]:
    torch.manual_seed(3)
    return KVShiftAttention(E, 6, 3), torch.randn(B, T, E)


def parametrized(layer: KVShiftAttention) -> None:
    parametrize.register_parametrization(layer.shift, "alpha", Doubled())


def pruned(layer: KVShiftAttention) -> None:
    prune.custom_from_mask(layer.shift, "alpha", torch.tensor([[1, 1], [1, 0], [0, 1]]))


changes = pytest.mark.parametrize("change", [parametrized, pruned])


@changes
def test_decoding_goes_by_the_coefficients_in_force(change):
    layer, x = make()
    change(layer)
    with torch.no_grad():
        whole, _ = layer(x)
        plain, _ = make()  # with the same weights
        plain.shift.alpha.copy_(layer.shift.alpha)
        torch.testing.assert_close(whole, plain(x)[0])
        outs, _ = run(layer, x[:, :4], *x[:, 4:].split(1, dim=1))
    torch.testing.assert_close(torch.cat(outs, dim=1), whole, rtol=1e-5, atol=1e-6)


@changes
def test_gradients_reach_the_original(change):
    layer, x = make()
    change(layer)
    layer(x)[0].square().sum().backward()
    (original,) = [p for name, p in layer.named_parameters() if "orig" in name]
    assert original.grad.count_nonzero() > 0


@changes
def test_the_original_does_not_decay(change):
    layer, _ = make()
    change(layer)
    groups = {group["name"]: group for group in param_groups(layer, lr=1.0)}
    (original,) = [p for name, p in layer.named_parameters() if "orig" in name]
    assert any(p is original for p in groups["shift"]["params"])
    assert not any(p is original for p in groups["decay"]["params"])


def test_casts_leave_the_original_in_float32():
    shift = KVShift(3)
    parametrize.register_parametrization(shift, "alpha", Doubled())
    assert {p.dtype for p in shift.to(torch.bfloat16).parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_adapters_of_parameters_are_refused_by_name():
    """PEFT wraps the shift in its own module, which hides the shift's attributes."""
    layer, x = make()
    model = get_peft_model(nn.Sequential(layer), LoraConfig(target_modules=[], target_parameters=["0.shift.alpha"]))
    with pytest.raises(TypeError, match=r"shift must be a KVShift, got a ParamWrapper.*modules_to_save=\[\"shift\"\]"):
        model(x)


def test_clamping_after_each_step_refuses_them():
    """The step changes the original, which the parametrization turns into another coefficient."""
    shift = KVShift(2, ShiftOptions(constraint="clamp"))
    parametrize.register_parametrization(shift, "alpha", Doubled())
    with pytest.raises(ValueError, match="model has a parametrized KVShift layer"):
        clamp_after_step(torch.optim.SGD(shift.parameters(), lr=1.0), shift)
