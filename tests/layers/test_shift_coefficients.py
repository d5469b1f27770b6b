"""The coefficients of `KVShift`: start values, precision through casts and checkpoints, constraints."""

import copy
import math

import pytest
import torch
from torch import nn

from kvshift import KVShift, ShiftOptions, clamp_after_step, param_groups
from kvshift.layers.shift import _warn_rounded
from tests.layers.shift_cases import NAMES, G, H, generator, layer, qkv


@pytest.mark.parametrize("window", [2, 3, 4])
def test_uniform_start_draws_all_but_the_last_and_sums_to_one(window):
    heads = 4999
    shift = KVShift(heads, ShiftOptions(targets=("k", "v"), window=window))
    shift.reset_parameters(generator(0))
    for parameter in (shift.alpha, shift.beta):
        assert parameter.shape == (heads, window)
        drawn, last = parameter[:, :-1], parameter[:, -1]
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert torch.equal(last, 1 - drawn.sum(1))
        # six standard errors of the mean and of the mean square of U(0, 1)
        assert (drawn.mean(0) - 1 / 2).abs().max() < 6 * math.sqrt(1 / 12 / heads)
        assert (drawn.square().mean(0) - 1 / 3).abs().max() < 6 * math.sqrt(4 / 45 / heads)
    assert not torch.equal(shift.alpha, shift.beta)
    assert (shift.alpha[:, -1] < 0).any() == (window > 2)  # with one number drawn, the last lies in (0, 1], too


def test_gate_draws_the_numbers_that_free_draws():
    free, gate = layer(seed=3), layer(seed=3, constraint="gate")
    # A logit and its sigmoid take a few roundings of numbers below 1, magnified at most by the logit (below 14).
    torch.testing.assert_close(gate.coefficients(), free.coefficients(), rtol=0, atol=32 * 2**-24)


@pytest.mark.parametrize("window", [2, 3, 4])
def test_identity_start(window):
    shift = layer(targets=("q", "k", "v"), window=window, init="identity")
    for parameter in shift.parameters():
        assert parameter.tolist() == [[1.0] + [0.0] * (window - 1)] * parameter.shape[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_start_values_do_not_depend_on_the_default_dtype(dtype):
    expected = layer(seed=5).state_dict()
    torch.set_default_dtype(dtype)
    try:
        drawn = layer(seed=5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for x in drawn.parameters()} == {torch.float32}
    torch.testing.assert_close(drawn.state_dict(), expected, rtol=0, atol=0)


def test_same_seed_same_bits():
    shift = layer(seed=1)
    first = copy.deepcopy(shift.state_dict())
    shift.reset_parameters(generator(2))
    assert not torch.equal(shift.alpha, first["alpha"])
    shift.reset_parameters(generator(1))
    torch.testing.assert_close(shift.state_dict(), first, rtol=0, atol=0)


@pytest.mark.parametrize("constraint", ["free", "gate", "clamp"])
@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to("cpu", torch.float16), torch.float16),
        (lambda m: m.type(torch.bfloat16), torch.bfloat16),
        (lambda m: m.bfloat16().float(), torch.float32),
        (lambda m: m.double().half(), torch.float16),
        (lambda m: copy.deepcopy(m.bfloat16()), torch.bfloat16),
        (lambda m: copy.deepcopy(m).bfloat16(), torch.bfloat16),
    ],
    ids=["to", "half", "to_device", "type", "float_again", "double_and_half", "copied_after", "copied_before"],
)
def test_casts_leave_every_bit_of_the_coefficients(cast, dtype, constraint):
    model = nn.Sequential(nn.Linear(3, 5), layer(targets=("q", "k", "v"), constraint=constraint))
    before = copy.deepcopy(model[1].state_dict())
    model = cast(model)
    assert {x.dtype for x in model[1].parameters()} == {torch.float32}
    torch.testing.assert_close(model[1].state_dict(), before, rtol=0, atol=0)
    assert model[0].weight.dtype == dtype


def test_a_cast_keeps_gradients_in_float32():
    shift = layer()
    shift.alpha.grad = torch.full_like(shift.alpha, 1 + 2**-20)
    shift.bfloat16()
    assert shift.alpha.grad.dtype == torch.float32
    assert (shift.alpha.grad == 1 + 2**-20).all()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loading_a_checkpoint_of_any_dtype_gives_float32(dtype, assign):
    model = nn.ModuleDict({"inner": layer(seed=0)})
    checkpoint = {name: x.to(dtype) for name, x in nn.ModuleDict({"inner": layer(seed=1)}).state_dict().items()}
    untouched = dict(checkpoint)
    model.load_state_dict(checkpoint, assign=assign)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, checkpoint[name].float())
        assert checkpoint[name] is untouched[name]


def test_deepcopy_loads_into_itself():
    original = layer(seed=0)
    loaded = copy.deepcopy(original)
    loaded.load_state_dict({name: x.bfloat16() for name, x in layer(seed=1).state_dict().items()}, assign=True)
    assert {x.dtype for x in loaded.parameters()} == {torch.float32}
    assert torch.equal(original.alpha, layer(seed=0).alpha)
    assert not torch.equal(loaded.alpha, original.alpha)


def test_meta_device():
    with torch.device("meta"):
        shift = KVShift(G, ShiftOptions(targets=("q", "k", "v")), num_heads=H)
    assert {x.device.type for x in shift.parameters()} == {"meta"}
    shift.bfloat16().to_empty(device="cpu").reset_parameters(generator(0))
    assert {x.dtype for x in shift.parameters()} == {torch.float32}
    torch.testing.assert_close(shift.state_dict(), layer(targets=("q", "k", "v")).state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("assign", [False, True])
def test_meta_device_and_a_checkpoint(assign):
    shift = KVShift(G, device="meta")
    if not assign:
        shift.to_empty(device="cpu")
    shift.load_state_dict({name: x.bfloat16() for name, x in layer(seed=1).state_dict().items()}, assign=assign)
    assert {(x.dtype, x.device.type) for x in shift.parameters()} == {(torch.float32, "cpu")}


def replaced(shift: KVShift, dtype: torch.dtype) -> None:
    for name, parameter in list(shift.named_parameters()):
        shift._parameters[name] = nn.Parameter(parameter.detach().to(dtype))


def through_data(shift: KVShift, dtype: torch.dtype) -> None:
    for parameter in shift.parameters():
        parameter.data = parameter.data.to(dtype)


@pytest.mark.parametrize("constraint", ["free", "gate"])
@pytest.mark.parametrize("cast", [replaced, through_data])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_makes_them_less_precise_is_told_of_once(dtype, cast, constraint):
    """Loaders and optimizers that bypass the module's methods cast them, such as those of accelerate and DeepSpeed."""
    _warn_rounded.cache_clear()
    shift, inputs = layer(constraint=constraint), qkv(dtype=dtype)
    shift(*inputs)
    cast(shift, dtype)
    with pytest.warns(UserWarning, match=rf"coefficients of a KV shift are {dtype}: .* from_pretrained\("):
        shift(*inputs)
    shift(*inputs)  # no second warning: pytest would raise it


def test_small_steps_move_the_coefficients_of_a_bfloat16_model():
    """100 steps of 1e-5 from just below 1: bfloat16 has steps of 2^-8 there and would stay."""
    model = nn.Sequential(nn.Linear(3, 5), layer(init="identity")).bfloat16()
    shift = model[1]
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-5))
    q, k, v = qkv(dtype=torch.bfloat16)
    for _ in range(100):
        optimizer.zero_grad()
        _, k_hat, v_hat, _ = shift(q, k, v)
        (k_hat.float().square().mean() + v_hat.float().square().mean()).backward()
        optimizer.step()
    for parameter in (shift.alpha, shift.beta):
        moved = 1 - parameter[:, 0]
        # Adam's step is lr, as long as the gradient keeps its sign
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=0.05, atol=0)


def test_gate_mixes_with_weights_that_sum_to_one():
    shift = layer(constraint="gate", targets=("q", "k", "v"))
    for name, mix in shift.coefficients().items():
        now = 1 / (1 + torch.exp(-getattr(shift, NAMES[name]).double()))
        torch.testing.assert_close(mix.double(), torch.cat([now, 1 - now], dim=1), rtol=0, atol=2**-23)
        assert (mix.sum(1) == 1).all()


def clamp_layer(values: list[list[float]]) -> KVShift:
    shift = KVShift(len(values), ShiftOptions(constraint="clamp"))
    with torch.no_grad():
        shift.alpha.copy_(torch.tensor(values))
        shift.beta.copy_(torch.tensor(values))
    return shift


def test_clamp_in_forward():
    shift = clamp_layer([[-0.5, 0.25], [1.5, 1.0], [0.0, 3.0]])
    assert shift.coefficients()["k"].tolist() == [[0.0, 0.25], [1.0, 1.0], [0.0, 1.0]]
    assert shift.alpha[0, 0] == -0.5


def test_clamp_after_step_brings_the_parameters_back():
    model = nn.Sequential(nn.Linear(3, 5), clamp_layer([[0.1, 0.9], [0.5, 0.5], [1.0, 0.0]]))
    shift = model[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = clamp_after_step(optimizer, model)

    def step():
        shift.alpha.grad = torch.tensor([[0.3, -0.3], [0.25, -0.25], [0.5, 0.5]])
        optimizer.step()

    step()
    assert shift.alpha.tolist() == [[0.0, 1.0], [0.25, 0.75], [0.5, 0.0]]
    handle.remove()
    step()
    assert shift.alpha.min() < 0


def test_a_coefficient_outside_has_no_gradient_to_come_back_by():
    """This is why `clamp_after_step` exists: it moves them to 0 or 1, where they must have a gradient."""
    shift = clamp_layer([[0.5, 0.0], [1.5, 1.0], [-0.5, 3.0]])
    q, k, v = qkv()
    _, k_hat, _, _ = shift(q, k, v)
    k_hat.square().sum().backward()
    outside = (shift.alpha < 0) | (shift.alpha > 1)
    assert (shift.alpha.grad[outside] == 0).all()
    assert (shift.alpha.grad[~outside] != 0).all()


def test_clamp_after_step_needs_a_clamped_layer():
    model = nn.Sequential(layer())
    with pytest.raises(ValueError, match='model has no KVShift layer with constraint="clamp"'):
        clamp_after_step(torch.optim.SGD(model.parameters(), lr=1.0), model)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"alpha": (G, 2), "beta": (G, 2)}),
        ({"targets": ()}, {}),
        ({"targets": ("k",)}, {"alpha": (G, 2)}),
        ({"targets": ("v",), "window": 3}, {"beta": (G, 3)}),
        ({"targets": ("q", "k", "v"), "window": 4}, {"alpha": (G, 4), "beta": (G, 4), "gamma": (H, 4)}),
        ({"targets": ("q", "v"), "constraint": "gate"}, {"beta": (G, 1), "gamma": (H, 1)}),
        ({"constraint": "clamp"}, {"alpha": (G, 2), "beta": (G, 2)}),
    ],
)
def test_state_dict_keys_are_frozen(options, expected):
    assert {name: tuple(x.shape) for name, x in layer(**options).state_dict().items()} == expected
