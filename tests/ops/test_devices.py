"""Intermediate tensors are on the device of the caller's tensors, whatever PyTorch's default device is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvshift import ShiftOptions
from kvshift.layers import KVShift, KVShiftAttention
from kvshift.ops import ShiftState, kv_shift

from .cases import assert_same_bits, outcome, random_case
from .conftest import skip_unless_built
from .test_promises import MODES


@pytest.fixture
def another_default() -> Iterator[None]:
    """Make "meta" the default device: tensors without a device get no memory, and a kernel would write to address 0."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("backend", ["auto", "cpu", "eager", "triton", "reference"])
def test_another_default_device_changes_no_bit(mode, backend, request):
    """Holds forward and backward, and under a transform of torch.func."""
    skip_unless_built(backend)
    case = random_case(2, **mode)
    expected = outcome(case, backend)
    one = torch.func.vmap(lambda k: kv_shift(k, case.v, case.alpha, case.beta, backend="eager")[0])(case.k[None])
    request.getfixturevalue("another_default")
    assert_same_bits(outcome(case, backend), expected)
    watched = torch.func.vmap(lambda k: kv_shift(k, case.v, case.alpha, case.beta, backend=backend)[0])(case.k[None])
    if backend != "reference":
        assert torch.equal(watched, one)


@pytest.mark.parametrize("targets", [("k", "v"), ("q", "k", "v"), ("v",), ()])
@pytest.mark.parametrize("position_encoding", ["rope", "alibi"])
def test_layers_follow_their_arguments(targets, position_encoding, request):
    generator = torch.Generator().manual_seed(3)
    layer = KVShiftAttention(
        12, 6, 3, shift_options=ShiftOptions(targets=targets), position_encoding=position_encoding, max_rollback=2
    )
    x = torch.randn(2, 7, 12, generator=generator)
    calls = {
        "whole": {},
        "padding": {"mask": torch.arange(7) < torch.tensor([[5], [7]])},
        "documents": {"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * 2)},
        "pack": {"cu_seqlens": torch.tensor([0, 3, 3, 7])},
    }

    def results() -> list[torch.Tensor]:
        found = []
        for name, where in calls.items():
            given = x[:1] if name == "pack" else x
            out, state = layer(given, **where)
            found += [out, *torch.autograd.grad(out.sum(), list(layer.parameters()))]
            with torch.no_grad():
                order = list(range(state.sequences))[::-1]
                cropped = state.reorder(order).crop(2)
                later = x[:, :1] if name != "pack" else x[:1, :2]
                further = {"cu_seqlens": torch.tensor([0, 1, 1, 2], device="cpu")} if name == "pack" else {}
                found.append(layer(later, state=cropped, **further)[0])
        return found

    expected = results()
    request.getfixturevalue("another_default")
    for result, bits in zip(results(), expected, strict=True):
        assert torch.equal(result, bits)


def test_a_state_follows_its_tensors(another_default):
    """Holds also for beam indices given as a list."""
    rows = torch.arange(6.0, device="cpu").reshape(3, 1, 2, 1)
    state = ShiftState(rows, rows, 1)
    assert state.reorder([2, 0, 1]).k.flatten().tolist() == [4, 5, 0, 1, 2, 3]
    assert state.select([1]).k.flatten().tolist() == [2, 3]
    assert [part.k.device.type for part in state.split()] == ["cpu"] * 3
    assert state.reset().k.device.type == "cpu"


def test_one_token_of_a_layer_follows_its_arguments(request):
    """A single token takes the decoding path."""
    shift = KVShift(3)
    q, k, v = (torch.randn(2, 1, heads, 8) for heads in (6, 3, 3))
    rotary = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    with torch.no_grad():
        state = ShiftState(torch.randn_like(k), torch.randn_like(v), 1)
        expected = shift(q, k, v, state=state, rotary=rotary)[:3]
        request.getfixturevalue("another_default")
        for result, bits in zip(shift(q, k, v, state=state, rotary=rotary)[:3], expected, strict=True):
            assert torch.equal(result, bits)
