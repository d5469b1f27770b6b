"""Memory that attention saves for backward: fewer bytes, the same bits of gradients, and no effect on other hooks."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from kvshift import KVShift
from kvshift.layers import recompute
from kvshift.layers.recompute import (
    is_worth_recomputing,
    may_recompute,
    recompute_in_backward,
    recompute_shift_in_backward,
)
from kvshift.ops import attention_inputs
from tests.covering import covering
from tests.layers.attention_cases import ATTENTION, GQA, MHA, NUMBERS, VARIED, D, E, T, make, outcome, same_bits, tokens
from tests.layers.kept import bytes_kept

B, HEADS = 2, {"mha": MHA, "gqa": GQA}


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    monkeypatch.setattr(recompute, "_MIN_ELEMENTS", {"cpu": 0})


@pytest.fixture
def shifts(monkeypatch):
    """A list whose only number counts the shifts of keys and values."""
    calls, operator = [0], attention_inputs.shift_keys_values

    def with_progress(*args, **options):
        calls[0] += 1
        return operator(*args, **options)

    monkeypatch.setattr(attention_inputs, "shift_keys_values", with_progress)
    return calls


def kept(layer, length, dtype=torch.float64):
    x = tokens(B, length, dtype=dtype)
    return bytes_kept(lambda: layer(x)[0], x, *layer.parameters())


@covering(options=list(VARIED), dtype=[torch.float64, torch.float32, torch.bfloat16], where=list(ATTENTION))
def test_gradients_keep_every_bit(options, dtype, where, shifts, keep_all):
    layer = make(dtype=dtype, **VARIED[options])
    x = tokens(1 if where == "cu_seqlens" else B, T, dtype=dtype)
    expected = keep_all(outcome, layer, x, **ATTENTION[where])
    shifts[0] = 0
    same_bits(outcome(layer, x, **ATTENTION[where]), expected)
    assert shifts[0] == (2 if {"k", "v"} & set(layer.shift.targets) else 0)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"position_encoding": "none", "bias": True}], ids=str)
@pytest.mark.parametrize("heads", [MHA, GQA], ids=["mha", "gqa"])
def test_a_token_keeps_what_it_keeps_without_a_shift(heads, options):
    layer, vanilla = (make(heads, shift_targets=targets, **options) for targets in (("k", "v"), ()))
    more = {length: kept(layer, length) - kept(vanilla, length) for length in (T, 4 * T)}
    assert more[T] == more[4 * T]


@covering(heads=HEADS, options=[{}, {"position_encoding": "alibi"}, {"sliding_window": 4}], where=["mask", "seq_idx"])
def test_shifted_heads_are_not_kept_where_there_are_boundaries(heads, options, where, keep_all):
    layer, x = make(heads, dtype=torch.float32, **options), tokens(B, T, dtype=torch.float32)

    def count():
        return bytes_kept(lambda: layer(x, **ATTENTION[where])[0], x, *layer.parameters(), *ATTENTION[where].values())

    # Attention with a bias gets a copy of each key and value head for each of its query heads; float32 has 4 bytes.
    assert keep_all(count) - count() == 2 * B * T * heads[0] * D * 4


@covering(dtype=[torch.float32, torch.bfloat16], where=["plain", "mask"], heads=HEADS)
def test_what_autocast_casts_is_not_kept(dtype, where, heads, keep_all):
    layer, x = make(heads, dtype=torch.float32, qk_norm=True), tokens(B, T, dtype=torch.float32)

    def run(function):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return function()

    def count():
        return bytes_kept(lambda: run(lambda: layer(x, **ATTENTION[where])[0]), x, *layer.parameters())

    x = x.to(dtype)
    expected = run(lambda: keep_all(outcome, layer, x, **ATTENTION[where]))
    same_bits(run(lambda: outcome(layer, x, **ATTENTION[where])), expected)
    left_out = heads[1] if where == "plain" else heads[0]
    assert keep_all(count) - count() == 2 * B * T * left_out * D * 2


def test_a_part_of_the_graph_and_then_all_of_it(keep_all):
    layer, x = make(), tokens(B, T).requires_grad_()
    out = layer(x)[0].sum()
    parts = [[layer.v_proj.weight], [layer.q_proj.weight], [layer.shift.alpha], [x]]
    actual = [torch.autograd.grad(out, part, retain_graph=True) for part in parts]
    for grads, part in zip(actual, parts, strict=True):
        same_bits(grads, keep_all(lambda part=part: torch.autograd.grad(layer(x)[0].sum(), part)))


def test_without_gradients_nothing_is_done(monkeypatch):
    monkeypatch.setattr(recompute, "recompute_in_backward", None)
    layer, x = make(), tokens(B, T)
    with torch.no_grad():
        layer(x)
    with torch.inference_mode():
        layer(x)
    with pytest.raises(TypeError):
        layer(x)


@pytest.mark.parametrize("frozen", [("alpha",), ("beta",), ("alpha", "beta")], ids=str)
def test_a_tensor_whose_coefficients_are_frozen_is_kept(frozen, shifts, keep_all):
    """The coefficients' gradient then needs no raw tensor, so recomputing the shifted one would save nothing."""
    layer, x = make(), tokens(B, T)
    for name in frozen:
        getattr(layer.shift, name).requires_grad_(False)
    expected = keep_all(outcome, layer, x)
    shifts[0] = 0
    same_bits(outcome(layer, x), expected)
    assert shifts[0] == (2 if len(frozen) == 1 else 1)
    assert keep_all(kept, layer, T) - kept(layer, T) == (2 - len(frozen)) * B * T * MHA[1] * D * 8


def test_a_frozen_layer_trains_its_coefficients(keep_all):
    layer, x = make(), tokens(B, T)
    layer.requires_grad_(False)
    layer.shift.requires_grad_(True)

    def run():
        return torch.autograd.grad(layer(x)[0].square().sum(), [layer.shift.alpha, layer.shift.beta])

    same_bits(run(), keep_all(run))


def test_small_tensors_are_kept(monkeypatch):
    monkeypatch.undo()
    assert not is_worth_recomputing(torch.empty(2**20 - 1, device="meta").expand(1, -1)[:, :10])
    assert not is_worth_recomputing(torch.empty(2**20 - 1))
    assert is_worth_recomputing(torch.empty(2**20))


def test_hooks_of_others_get_their_tensors(shifts, keep_all):
    layer, x = make(), tokens(B, T)
    seen = {True: [], False: []}
    for is_recomputed, found in seen.items():
        with saved_tensors_hooks(lambda t, found=found: found.append(t.shape) or t.detach(), lambda t: t):
            out = (layer(x) if is_recomputed else keep_all(layer, x))[0]
        out.sum().backward()
    assert seen[True] == seen[False]
    shifts[0] = 0
    with save_on_cpu():
        out = layer(x)[0]
    out.sum().backward()
    assert shifts[0] == 1
    with disable_saved_tensors_hooks("not here"):
        layer(x)[0].sum().backward()
    assert shifts[0] == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, shifts, keep_all):
    layer, x = make(qk_norm=True), tokens(B, T)

    def run(x, **where):
        return (checkpoint(lambda x: layer(x, **where)[0], x, use_reentrant=reentrant),)

    expected = keep_all(outcome, layer, x)
    shifts[0] = 0
    x = x.clone().requires_grad_()
    out = run(x)[0]
    out.square().sum().backward()
    same_bits([out, x.grad, *(p.grad for p in layer.parameters())], expected)
    assert shifts[0] == (3 if reentrant else 2)  # forward twice; the reentrant backward, on its own graph, once more


def test_function_transforms_are_left_alone(keep_all):
    layer, x = make(), tokens(B, T)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))[0].square().sum()

    expected = outcome(layer, x)[2:]
    actual = torch.func.grad(loss)(parameters, x)
    for grad, e in zip(actual.values(), expected, strict=True):
        torch.testing.assert_close(grad, e)
    answers = []
    torch.func.vmap(lambda x: answers.append(may_recompute()) or x)(x)
    assert answers == [False]
    assert may_recompute()


@pytest.mark.parametrize("change", ["seq_idx", "alpha", "k_norm"])
def test_what_was_changed_in_place_since_is_not_shifted_again(change):
    layer, numbers = make(qk_norm=True), NUMBERS.repeat(B, 1)
    out = layer(tokens(B, T), seq_idx=numbers)[0].sum()
    with torch.no_grad():
        {"seq_idx": numbers, "alpha": layer.shift.alpha, "k_norm": layer.k_norm.weight}[change].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, layer.q_proj.weight)  # needs neither the shift nor the norm of the keys


def test_a_step_between_two_backward_passes_does_not_shift_by_new_coefficients():
    """The coefficients of a gate are computed, and autograd saves the old ones."""
    layer = make(shift_constraint="gate")
    layer.requires_grad_(False)
    layer.shift.requires_grad_(True)
    x = tokens(B, T)
    expected = torch.autograd.grad(layer(x)[0].sum(), layer.shift.alpha)
    out = layer(x)[0].sum()
    with torch.no_grad():
        layer.shift.alpha.add_(1)
    same_bits(torch.autograd.grad(out, layer.shift.alpha), expected)


@pytest.mark.parametrize("where", ["k", "query", "result"])
def test_raw_and_kept_tensors_changed_in_place_are_errors(where):
    q, k, v = (torch.randn(1, 3, 5, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    layer, inputs = KVShift(3).double(), [2 * x.transpose(1, 2) for x in (q, k, v)]
    k_hat, v_hat = (x.transpose(1, 2) for x in layer(*inputs)[1:3])
    query = inputs[0].transpose(1, 2)
    with recompute_shift_in_backward(layer, (inputs[1], inputs[2]), (k_hat, v_hat)):
        out = F.scaled_dot_product_attention(query, k_hat, v_hat).softmax(3)
    with torch.no_grad():
        {"k": inputs[1], "query": query, "result": out}[where].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.square().sum().backward() if where != "result" else out.sum().backward()


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "global", "replaced"])
def test_a_hook_that_changes_the_shifted_heads_is_heeded(kind, keep_all, monkeypatch):
    layer, x = make(), tokens(B, T)
    original = layer.shift.forward
    if kind == "replaced":
        layer.shift.forward = lambda q, k, v, **options: original(q, 2 * k, v, **options)
    elif kind == "forward_pre":
        layer.shift.register_forward_pre_hook(lambda module, inputs: (inputs[0], 2 * inputs[1], inputs[2]))
    elif kind == "forward":
        layer.shift.register_forward_hook(lambda module, inputs, out: (out[0], 2 * out[1], *out[2:]))
    else:
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, inputs, out: (out[0], 2 * out[1], *out[2:]) if module is layer.shift else None
        )
    try:
        same_bits(outcome(layer, x), keep_all(outcome, layer, x))
    finally:
        if kind == "global":
            handle.remove()


def test_the_state_that_comes_back_is_the_shifted_heads(keep_all):
    """Whoever keeps the state keeps its tensors, and gradients flow through them."""
    layer, x = make(GQA), tokens(B, T).requires_grad_()

    def run():
        out, state = layer(x[:, :4])
        later, _ = layer(x[:, 4:], state=state)
        return [out, later, state.k, state.v, *torch.autograd.grad((out.sum() + later.square().sum()), x)]

    same_bits(run(), keep_all(run))


def test_a_graph_that_nobody_holds_is_gone_at_once():
    """No tensor holds its own graph, so the graph is freed without the garbage collector."""
    layer, x = make(), tokens(B, T)
    gc.collect()
    gc.disable()
    try:
        out = layer(x)[0]
        nodes = [out.grad_fn]
        gone = []
        while nodes:
            node = nodes.pop()
            if node.name() == "ScaledDotProductFlashAttentionForCpuBackward0":
                node.metadata["watched"] = _Watched(gone)
                break
            nodes += [following for following, _ in node.next_functions if following is not None]
        del node, nodes, out
        assert gone == [True]
    finally:
        gc.enable()


class _Watched:
    def __init__(self, gone):
        self.gone = gone

    def __del__(self):
        self.gone.append(True)


def test_a_node_that_is_asked_for_what_it_keeps_gives_it():
    q, k, v = (tokens(1, 3, seed=i)[..., : D * 2].unflatten(2, (2, D)).requires_grad_() for i in range(3))
    layer = KVShift(2).double()
    k_hat, v_hat = (x.transpose(1, 2) for x in layer(q, k, v)[1:3])
    with recompute_shift_in_backward(layer, (k, v), (k_hat, v_hat)):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k_hat, v_hat, is_causal=True)
    for _ in range(2):
        assert torch.equal(out.grad_fn._saved_key, k_hat)
        assert torch.equal(out.grad_fn._saved_value, v_hat)
        assert out.grad_fn._saved_key.stride() == k_hat.stride()


def test_empty_tensors_pass():
    layer = make()
    for shape in ((0, T), (B, 0)):
        out = layer(tokens(*shape).requires_grad_())[0]
        out.sum().backward()
    assert out.shape == (B, 0, E)
    x = torch.empty(0, requires_grad=True)  # all empty tensors have the same address
    with recompute_in_backward([2 * x], pytest.fail, [x]):
        y = (3 * x).square().sum()
    y.backward()
