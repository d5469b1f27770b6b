"""Parameter groups: which parameters decay, and the learning rate of the coefficients."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from kvshift import KVShift, KVShiftAttention, ShiftOptions, clamp_after_step, param_groups
from tests.layers.attention_cases import with_shift_options

E, V = 12, 17


@pytest.mark.parametrize("model", [[], [nn.Parameter(torch.ones(2))], nn.Linear(2, 2).parameters(), None])
def test_what_is_no_module_is_named(model):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not its parameters; got "):
        param_groups(model, lr=0.1)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not its parameters; got "):
        clamp_after_step(torch.optim.SGD([nn.Parameter(torch.ones(2))]), model)


class Tied(nn.Module):
    """A model with an embedding tied to the head, two attention layers, a norm and biases."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, E)
        options = with_shift_options(options)
        self.layers = nn.ModuleList(KVShiftAttention(E, 3, head_dim=2, bias=True, **options) for _ in range(2))
        self.norm = nn.LayerNorm(E)
        self.head = nn.Linear(E, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(self.norm(x))


def names(model: nn.Module, groups: list[dict]) -> dict[str, set[str]]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: {by_id[id(parameter)] for parameter in group["params"]} for group in groups}


def test_every_parameter_is_in_one_group():
    model = Tied(qk_norm=True, shift_targets=("q", "k", "v"))
    groups = param_groups(model, lr=0.5)
    found = names(model, groups)
    everything = {name for name, _ in model.named_parameters()}
    shift = {name for name in everything if ".shift." in name}
    vectors = {name for name in everything if name.endswith("bias") or "norm" in name}
    assert len(shift) == 6
    assert found == {"decay": everything - shift - vectors, "no_decay": vectors, "shift": shift}
    assert "embed.weight" in found["decay"]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))  # tied weights count once
    rates = [(group["lr"], group["weight_decay"]) for group in groups]
    assert rates == [(0.5, 0.1), (0.5, 0.0), (0.5, 0.0)]
    groups = param_groups(model, lr=0.25, weight_decay=0.5, shift_lr_multiplier=8.0)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.25, 0.5), (0.25, 0.0), (2.0, 0.0)]


def test_shared_coefficients_come_once():
    model = Tied()
    model.layers[1].shift = model.layers[0].shift
    assert names(model, param_groups(model, lr=1.0))["shift"] == {"layers.0.shift.alpha", "layers.0.shift.beta"}


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = Tied().requires_grad_(False)
    assert param_groups(model, lr=1.0) == []
    model.layers[1].shift.beta.requires_grad_(True)
    assert names(model, param_groups(model, lr=1.0)) == {"shift": {"layers.1.shift.beta"}}
    linear = nn.Linear(2, 3)
    assert names(linear, param_groups(linear, lr=1.0)) == {"decay": {"weight"}, "no_decay": {"bias"}}


def test_a_layer_alone_and_a_gate():
    shift = KVShift(3, ShiftOptions(constraint="gate"))
    assert names(shift, param_groups(shift, lr=1.0)) == {"shift": {"alpha", "beta"}}


def test_the_groups_survive_a_cast_and_the_compiler():
    model = torch.compile(Tied().bfloat16())
    assert len(names(model, param_groups(model, lr=1.0))["shift"]) == 4


@pytest.mark.parametrize("constraint", ["free", "gate", "clamp"])
def test_a_bfloat16_model_learns_its_coefficients_and_twice_the_same(constraint):
    def train():
        torch.manual_seed(0)
        model = Tied(shift_constraint=constraint).bfloat16()
        start = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.AdamW(param_groups(model, lr=1e-4))
        if constraint == "clamp":
            clamp_after_step(optimizer, model)
        for _ in range(23):
            tokens = torch.randint(V, (5, 7))
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return start, model.state_dict()

    start, trained = train()
    _, again = train()
    for name, parameter in trained.items():
        assert torch.equal(parameter, again[name]), name
        if ".shift." in name:
            assert parameter.dtype == torch.float32
            assert (parameter != start[name]).all(), name


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`", "ignore:.*NO_SHARD.* is deprecated")
@pytest.mark.parametrize("kept", [True, False], ids=["use_orig_params", "flattened"])
def test_parameters_flattened_by_fsdp_are_refused(alone, kept: bool):
    model = FullyShardedDataParallel(
        Tied(shift_constraint="clamp"), device_id=torch.device("cpu"), use_orig_params=kept
    )
    if kept:
        groups = param_groups(model, lr=1.0)
        assert len(names(model, groups)["shift"]) == 4
        return
    with pytest.raises(ValueError, match=r"layers\.0\.shift has none: .* use_orig_params=True"):
        param_groups(model, lr=1.0)
    with pytest.raises(ValueError, match=r"layers\.0\.shift has none: .* use_orig_params=True"):
        clamp_after_step(torch.optim.SGD(model.parameters()), model)


def test_an_optimizer_of_accelerate_clamps_too():
    model, optimizer = KVShift(2, ShiftOptions(constraint="clamp")), Accelerator(cpu=True).prepare
    optimizer = optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    clamp_after_step(optimizer, model)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    assert all((parameter == 0).all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["lr", "weight_decay", "shift_lr_multiplier"])
@pytest.mark.parametrize("value", [-0.5, float("nan")])
def test_bad_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} must be 0 or more, got {value}"):
        param_groups(Tied(), **{"lr": 1.0, name: value})
