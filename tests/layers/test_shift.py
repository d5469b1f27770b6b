"""The module that owns the coefficients: start values, precision, constraints, targets, errors."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from kvshift import KVShift, ShiftOptions, ShiftState, clamp_after_step, kv_shift, param_groups
from kvshift.ops import shift_tokens

B, T, G, H, D, DV = 2, 11, 3, 5, 7, 13
TARGETS = [targets for n in range(4) for targets in itertools.combinations(("q", "k", "v"), n)]
NAMES = {"q": "gamma", "k": "alpha", "v": "beta"}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def qkv(length: int = T, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    rng = generator(seed)
    return tuple(
        torch.randn(B, length, heads, size, generator=rng, dtype=torch.float64).to(dtype)
        for heads, size in ((H, D), (G, D), (G, DV))
    )


def layer(seed: int = 0, **options) -> KVShift:
    shift = KVShift(G, ShiftOptions(**options), num_heads=H)
    shift.reset_parameters(generator(seed))
    return shift


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
    assert (shift.alpha[:, -1] < 0).any() == (window > 2)  # with one number drawn the last lies in (0, 1] too


def test_gate_starts_with_the_law_of_uniform():
    heads = 4999
    shift = KVShift(heads, ShiftOptions(constraint="gate"))
    shift.reset_parameters(generator(0))
    assert shift.alpha.shape == (heads, 1)
    now = shift.coefficients()["k"][:, 0]
    quantiles = torch.quantile(now, torch.linspace(0.1, 0.9, 9))
    assert (quantiles - torch.linspace(0.1, 0.9, 9)).abs().max() < 6 * math.sqrt(1 / 4 / heads)


def test_gate_draws_the_numbers_that_free_draws():
    free, gate = layer(seed=3), layer(seed=3, constraint="gate")
    # a logit and its sigmoid: a few roundings of numbers below 1, magnified by the logit (below 14) at most
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
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.type(torch.bfloat16),
        lambda m: m.bfloat16().float(),
        lambda m: copy.deepcopy(m.bfloat16()),
        lambda m: copy.deepcopy(m).bfloat16(),
    ],
    ids=["to", "bfloat16", "half", "to_device", "type", "float_again", "copied_after", "copied_before"],
)
def test_casts_leave_every_bit_of_the_coefficients(cast, constraint):
    model = nn.Sequential(nn.Linear(3, 5), layer(targets=("q", "k", "v"), constraint=constraint))
    before = copy.deepcopy(model[1].state_dict())
    model = cast(model)
    assert {x.dtype for x in model[1].parameters()} == {torch.float32}
    torch.testing.assert_close(model[1].state_dict(), before, rtol=0, atol=0)


def test_a_cast_does_not_hold_back_the_rest_of_the_model():
    model = nn.Sequential(nn.Linear(3, 5), layer()).bfloat16()
    assert model[0].weight.dtype == torch.bfloat16


def test_a_cast_keeps_gradients_in_float32():
    shift = layer()
    shift.alpha.grad = torch.full_like(shift.alpha, 1 + 2**-20)
    shift.bfloat16()
    assert shift.alpha.grad.dtype == torch.float32
    assert (shift.alpha.grad == 1 + 2**-20).all()


def test_double_and_back():
    shift = layer()
    before = copy.deepcopy(shift.state_dict())
    shift.double()
    assert {x.dtype for x in shift.parameters()} == {torch.float64}
    shift.half()
    assert {x.dtype for x in shift.parameters()} == {torch.float32}
    torch.testing.assert_close(shift.state_dict(), before, rtol=0, atol=0)


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
    twin = copy.deepcopy(original)
    twin.load_state_dict({name: x.bfloat16() for name, x in layer(seed=1).state_dict().items()}, assign=True)
    assert {x.dtype for x in twin.parameters()} == {torch.float32}
    assert torch.equal(original.alpha, layer(seed=0).alpha)
    assert not torch.equal(twin.alpha, original.alpha)


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


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("constraint", ["free", "clamp"])
@pytest.mark.parametrize("targets", TARGETS)
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


def test_key_and_value_shift_is_the_operator():
    shift = layer()
    q, k, v = qkv()
    _, k_hat, v_hat, state = shift(q, k, v)
    expected = kv_shift(k, v, shift.alpha, shift.beta)
    assert torch.equal(k_hat, expected[0])
    assert torch.equal(v_hat, expected[1])
    assert torch.equal(state.k, expected[2].k)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("targets", TARGETS[1:])
def test_every_split_equals_the_whole(targets, window, dtype, grad):
    """The products are the same and are added in the same order: not a bit differs."""
    shift = layer(targets=targets, window=window)
    inputs = qkv(dtype=dtype)
    with torch.set_grad_enabled(grad):
        *whole, last = shift(*inputs)
        for sizes in ([i, T - i] for i in range(T + 1)):
            check_pieces(shift, inputs, whole, last, sizes)
        check_pieces(shift, inputs, whole, last, [1] * T)


def check_pieces(shift, inputs, whole, last, sizes):
    state, pieces = None, []
    for q, k, v in zip(*(x.split(sizes, dim=1) for x in inputs), strict=True):
        *outputs, state = shift(q, k, v, state=state)
        pieces.append(outputs)
    joined = [torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)]
    torch.testing.assert_close(joined, whole, rtol=0, atol=0)
    for name in ("k", "v", "q"):
        torch.testing.assert_close(getattr(state, name), getattr(last, name), rtol=0, atol=0)


def test_documents_and_padding_reach_the_queries():
    shift = layer(targets=("q", "k", "v"))
    q, k, v = (x[:1] for x in qkv())
    cu_seqlens = torch.tensor([0, 4, 4, 5, T], dtype=torch.int32)
    mask = torch.ones(1, T, dtype=torch.bool)
    mask[0, [0, 6]] = False
    q_hat, k_hat, v_hat, state = shift(q, k, v, cu_seqlens=cu_seqlens, mask=mask)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        real = [t for t in range(start, end) if mask[0, t]]
        alone = shift(q[:, real], k[:, real], v[:, real])
        for packed, single in zip((q_hat, k_hat, v_hat), alone[:3], strict=True):
            assert torch.equal(packed[:, real], single)
    assert not q_hat[~mask].any()
    assert state.sequences == 4
    assert torch.equal(state.q[3, 0], q[0, -1])


def test_state_moves_with_the_queries():
    shift = layer(targets=("q", "v"))
    inputs, following = qkv(), qkv(length=1, seed=1)
    *_, state = shift(*inputs)
    continued = shift(*following, state=state.reorder([1, 0]))
    whole = shift(*(torch.cat([x.flip(0), y], dim=1) for x, y in zip(inputs, following, strict=True)))
    for piece, both in zip(continued[:3], whole[:3], strict=True):
        assert torch.equal(piece, both[:, T:])


@torch.no_grad()
def test_the_backend_asked_for_is_used_in_decoding_too(monkeypatch):
    q, k, v = qkv(length=1)
    shift = layer()
    *_, state = shift(q, k, v)
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'trition'"):
        shift(q, k, v, state=state, backend="trition")
    used = []
    monkeypatch.setattr("kvshift.ops.fused.kv_shift", lambda *a, **options: used.append(options) or kv_shift(*a))
    shift(q, k, v, state=state, backend="reference")
    assert used[0]["backend"] == "reference"


def change_in_place(shift):
    shift.alpha.mul_(3)
    shift.beta.mul_(5)


@pytest.mark.parametrize(
    "change",
    [
        change_in_place,
        lambda shift: shift.load_state_dict(layer(seed=2).state_dict()),
        lambda shift: shift.load_state_dict(layer(seed=2).state_dict(), assign=True),
        lambda shift: setattr(shift, "beta", nn.Parameter(shift.beta * 7)),
        lambda shift: shift.to("meta").to_empty(device="cpu").reset_parameters(generator(4)),
    ],
    ids=["in_place", "load", "assign", "replace", "new_memory"],
)
@pytest.mark.parametrize("copied", [False, True])
@torch.no_grad()
def test_decoding_follows_changed_coefficients(change, copied):
    shift = layer(seed=1)
    q, k, v = qkv(length=1)
    *_, state = shift(q, k, v)
    shift(q, k, v, state=state)
    if copied:
        shift = copy.deepcopy(shift)
    change(shift)
    _, k_hat, v_hat, _ = shift(q, k, v, state=state)
    expected_k, expected_v, _ = kv_shift(k, v, shift.alpha, shift.beta, state=state)
    assert torch.equal(k_hat, expected_k)
    assert torch.equal(v_hat, expected_v)


def test_gate_mixes_with_weights_that_sum_to_one():
    shift = layer(constraint="gate", targets=("q", "k", "v"))
    for name, mix in shift.coefficients().items():
        now = 1 / (1 + torch.exp(-getattr(shift, NAMES[name]).double()))
        torch.testing.assert_close(mix.double(), torch.cat([now, 1 - now], dim=1), rtol=0, atol=2**-23)
        assert (mix.sum(1) == 1).all()


def test_gate_learns():
    shift = layer(constraint="gate")
    q, k, v = qkv()
    _, k_hat, v_hat, _ = shift(q, k, v)
    (k_hat.square().sum() + v_hat.square().sum()).backward()
    assert shift.alpha.grad.shape == (G, 1)
    assert (shift.alpha.grad != 0).all()
    assert (shift.beta.grad != 0).all()


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
    """Why `clamp_after_step` exists."""
    shift = clamp_layer([[-0.5, 0.25], [1.5, 1.0], [0.5, 3.0]])
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


def test_repr_names_the_options():
    text = repr(layer(targets=("v", "k"), window=3, constraint="clamp", init="identity"))
    assert text == "KVShift(targets=('k', 'v'), window=3, constraint='clamp', init='identity')"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"targets": ("k", "w")}, r"targets must be a sequence of \"q\", \"k\", \"v\" .* got \('k', 'w'\)"),
        ({"targets": "kv"}, "targets must be a sequence .* got 'kv'"),
        ({"targets": None}, "targets must be a sequence .* got None"),
        ({"targets": [["k"]]}, "targets must be a sequence"),
        ({"targets": ("k", "k")}, "targets must not name a target twice"),
        ({"targets": ("q",)}, 'num_heads must be at least 1 when "q" is in targets, got None'),
        ({"targets": ("q",), "num_heads": 0}, 'num_heads must be at least 1 when "q" is in targets, got 0'),
        ({"window": 1}, "window must be an integer of at least 2, got 1"),
        ({"window": -2}, "window must be an integer of at least 2, got -2"),
        ({"window": 2.0}, "window must be an integer of at least 2, got 2.0"),
        ({"window": True}, "window must be an integer of at least 2, got True"),
        ({"constraint": "none"}, 'constraint must be "free", "gate" or "clamp", got \'none\''),
        ({"init": "zeros"}, 'init must be "uniform" or "identity", got \'zeros\''),
        ({"constraint": "gate", "window": 3}, 'window must be 2 with constraint="gate", got 3'),
        ({"constraint": "gate", "init": "identity"}, 'init must be "uniform" with constraint="gate"'),
    ],
)
def test_bad_options(options, message):
    heads = {name: options[name] for name in ("num_kv_heads", "num_heads") if name in options}
    shift = {name: value for name, value in options.items() if name not in heads}
    with pytest.raises(ValueError, match=message):
        KVShift(**{"num_kv_heads": G, **heads}, options=ShiftOptions(**shift))


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


@pytest.mark.parametrize("targets", [("k", "v"), ("q",)])
def test_a_state_of_another_type_is_refused(targets):
    q, k, v = qkv()
    with pytest.raises(TypeError, match="state must be a ShiftState or None, got tuple"):
        layer(targets=targets)(q, k, v, state=(k, v))


@pytest.mark.parametrize("shape", [(B, T, H + 1, D), (B, T + 1, H, D), (B + 1, T, H, D), (B, T, H * D)])
def test_queries_that_do_not_fit_are_named(shape):
    _, k, v = qkv()
    with pytest.raises(ValueError, match=rf"q must be \({B}, {T}, {H}, head size\)"):
        layer(targets=("q", "k", "v"))(torch.zeros(shape), k, v)


@pytest.mark.parametrize("targets", [(), ("k", "v")])
def test_bad_boundaries_are_refused_with_and_without_targets(targets):
    q, k, v = qkv()
    shift = layer(targets=targets)
    with pytest.raises(ValueError, match="mask must be"):
        shift(q, k, v, mask=torch.ones(B, T + 1, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask must be of dtype torch\.bool"):
        shift(q, k, v, mask=torch.ones(B, T))
    with pytest.raises(ValueError, match="the batch must be 1 row"):
        shift(q, k, v, cu_seqlens=torch.tensor([0, T]))


def test_a_longer_history_is_kept_for_roll_back():
    shift = layer(targets=("q", "k", "v"), window=3)
    q, k, v = qkv()
    rows = 2 + 3
    state = ShiftState(k.new_zeros(B, rows, G, D), v.new_zeros(B, rows, G, DV), rows, q.new_zeros(B, rows, H, D))
    *_, state = shift(q, k, v, state=state)
    *expected, _ = shift(q[:, : T - 3], k[:, : T - 3], v[:, : T - 3])
    again = shift(*(x[:, T - 3 :] for x in (q, k, v)), state=state.crop(3, window=3))
    whole = shift(q, k, v)
    for first, second, both in zip(expected, again[:3], whole[:3], strict=True):
        assert torch.equal(torch.cat([first, second], dim=1), both)
