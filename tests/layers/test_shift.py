"""`KVShift`: targets, splits, documents, decoding and errors."""

import itertools
import re

import pytest
import torch

from kvshift import KVShift, ShiftOptions
from kvshift.ops import attention_inputs, shift_tokens
from tests.covering import covering
from tests.layers.shift_cases import NAMES, B, D, G, H, T, layer, qkv

TARGETS = [targets for n in range(4) for targets in itertools.combinations(("q", "k", "v"), n)]


@covering(targets=TARGETS, constraint=["free", "clamp"], window=[2, 3])
def test_targets_are_shifted_and_the_others_come_back_as_they_are(targets, constraint, window):
    shift = layer(targets=targets, constraint=constraint, window=window)
    assert shift.targets == targets
    inputs = dict(zip("qkv", qkv(), strict=True))
    *outputs, state = shift(*inputs.values())
    for name, output in zip("qkv", outputs, strict=True):
        parameter = getattr(shift, NAMES[name])
        if name in targets:
            mix = parameter.clamp(0, 1) if constraint == "clamp" else parameter
            torch.testing.assert_close(output, shift_tokens(inputs[name], mix)[0], rtol=0, atol=0)
            assert torch.equal(shift.coefficients()[name], mix)
        else:
            assert parameter is None
            assert output is inputs[name]
    assert set(shift.coefficients()) == set(targets)
    if not targets:
        assert state is None
        return
    assert torch.equal(state.k, inputs["k"][:, 1 - window :])
    assert torch.equal(state.v, inputs["v"][:, 1 - window :])
    if "q" in targets:
        assert torch.equal(state.q, inputs["q"][:, 1 - window :])
    else:
        assert state.q is None


def test_targets_come_in_any_order_and_container():
    assert KVShift(G, ShiftOptions(targets=["v", "q"]), num_heads=H).targets == ("q", "v")


@torch.no_grad()
def test_the_backend_asked_for_is_used_in_decoding_too(monkeypatch):
    q, k, v = qkv(length=1)
    shift = layer()
    *_, state = shift(q, k, v)
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'trition'"):
        shift(q, k, v, state=state, backend="trition")
    used = []
    real = attention_inputs.shift_keys_values
    monkeypatch.setattr(attention_inputs, "shift_keys_values", lambda call: used.append(call.backend) or real(call))
    shift(q, k, v, state=state, backend="reference")
    assert used == ["reference"]


def test_repr_names_the_options():
    text = repr(layer(targets=("v", "k"), window=3, constraint="clamp", init="identity"))
    assert text == "KVShift(targets=('k', 'v'), window=3, constraint='clamp', init='identity')"


@pytest.mark.parametrize(
    ("field", "value", "words", "others"),
    [
        ("num_kv_heads", 0, "at least 1", {}),
        ("num_heads", None, 'at least 1 when "q" is in targets', {"targets": ("q",)}),
        ("num_heads", 0, 'at least 1 when "q" is in targets', {"targets": ("q",)}),
        ("targets", ("k", "w"), 'a sequence of "q", "k", "v"', {}),
        ("targets", "kv", 'a sequence of "q", "k", "v"', {}),
        ("targets", None, 'a sequence of "q", "k", "v"', {}),
        ("targets", [["k"]], 'a sequence of "q", "k", "v"', {}),
        ("targets", ("k", "k"), "not name a target twice", {}),
        ("window", 1, "an integer of at least 2", {}),
        ("window", -2, "an integer of at least 2", {}),
        ("window", 2.0, "an integer of at least 2", {}),
        ("window", True, "an integer of at least 2", {}),
        ("window", 3, '2 with constraint="gate"', {"constraint": "gate"}),
        ("constraint", "none", '"free", "gate" or "clamp"', {}),
        ("init", "zeros", '"uniform" or "identity"', {}),
        ("init", "identity", '"uniform" with constraint="gate": a sigmoid is never exactly 1', {"constraint": "gate"}),
    ],
)
def test_a_bad_option_is_named(field, value, words, others):
    given = {"num_kv_heads": G, field: value, **others}
    heads = {name: given.pop(name) for name in ("num_kv_heads", "num_heads") if name in given}
    got = "" if (field, value) == ("init", "identity") else f".*, got {re.escape(repr(value))}"
    with pytest.raises(ValueError, match=f"^{field} must (be )?{words}{got}$"):
        KVShift(**heads, options=ShiftOptions(**given))


def test_unknown_option():
    with pytest.raises(TypeError, match="widow"):
        ShiftOptions(widow=3)
    with pytest.raises(TypeError, match="options must be ShiftOptions, got tuple"):
        KVShift(G, ("k", "v"))


def test_a_state_without_queries_is_refused():
    q, k, v = qkv()
    *_, state = layer()(q, k, v)
    with pytest.raises(ValueError, match="state holds no queries, but this layer shifts them"):
        layer(targets=("q", "k", "v"))(q, k, v, state=state)


@pytest.mark.parametrize("shape", [(B, T, H + 1, D), (B, T + 1, H, D), (B + 1, T, H, D), (B, T, H * D)])
def test_queries_that_do_not_fit_are_named(shape):
    _, k, v = qkv()
    with pytest.raises(ValueError, match=rf"q must be \({B}, {T}, {H}, head size\)"):
        layer(targets=("q", "k", "v"))(torch.zeros(shape), k, v)


@pytest.mark.parametrize("targets", [(), ("k", "v")])
def test_bad_boundaries_are_refused_with_and_without_targets(targets):
    with pytest.raises(ValueError, match=r"mask must be \("):
        layer(targets=targets)(*qkv(), mask=torch.ones(B, T + 1, dtype=torch.bool))
