"""Single calls of the attention layer: formula, gradients, dtypes, causality, compilation and export."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kvshift import KVShiftAttention, ShiftOptions
from tests.covering import covering
from tests.layers.attention_cases import (
    BOUNDS,
    GQA,
    MASKS,
    MHA,
    NUMBERS,
    VARIED,
    B,
    D,
    E,
    T,
    close,
    close_all,
    gradients,
    left_mask,
    make,
    outcome,
    same_bits,
    tokens,
)
from tests.layers.attention_reference import reference_attention
from tests.layers.kept import bytes_kept


@covering(
    heads={"mha": MHA, "gqa": GQA},
    position_encoding=["rope", "alibi", "none"],
    qk_norm={"raw": False, "normed": True},
    sliding_window=[None, 4],
    targets={"plain": (), "k": ("k",), "kv": ("k", "v"), "qkv": ("q", "k", "v")},
)
def test_output_is_that_of_the_reference(heads, position_encoding, qk_norm, sliding_window, targets):
    options = {"position_encoding": position_encoding, "qk_norm": qk_norm, "sliding_window": sliding_window}
    layer = make(heads, **options, shift_targets=targets)
    x = tokens(2, T)
    with torch.no_grad():
        close(layer(x)[0], torch.stack([reference_attention(layer, row) for row in x]))


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("position_encoding", ["rope", "alibi"])
def test_gradients_are_those_of_the_reference(position_encoding, window):
    options = {"position_encoding": position_encoding, "qk_norm": True, "bias": True}
    layer = make(GQA, **options, shift_targets=("q", "k", "v"), shift_window=window)
    x, weights = tokens(1, 7).requires_grad_(), tokens(1, 7, seed=1)
    actual = gradients(layer(x)[0], weights, layer, x)
    expected = gradients(reference_attention(layer, x[0]).unsqueeze(0), weights, layer, x)
    close_all(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_smaller_dtypes_round_the_same_numbers(options, dtype):
    layer = make(dtype=dtype, **options)
    exact = make(dtype=torch.float64, **options)
    exact.load_state_dict(layer.state_dict())
    x = tokens(B, T, dtype=dtype)
    with torch.no_grad():
        out, _ = layer(x)
        assert out.dtype == dtype
        close(out, exact(x.double())[0].to(dtype))


@covering(
    window=[2, 3],
    targets={"kv": ("k", "v"), "qkv": ("q", "k", "v"), "v": ("v",)},
    constraint=["free", "clamp"],
    dtype=[torch.float64, torch.float32, torch.bfloat16],
)
def test_identity_start_is_plain_attention_bit_for_bit(window, targets, constraint, dtype):
    options = {"qk_norm": True, "bias": True}
    plain = make(GQA, shift_targets=(), dtype=dtype, **options)
    shifted = KVShiftAttention(
        E,
        *GQA,
        shift_options=ShiftOptions(targets=targets, window=window, constraint=constraint, init="identity"),
        head_dim=D,
        dtype=dtype,
        **options,
    )
    shifted.load_state_dict({**shifted.state_dict(), **plain.state_dict()})
    x, mask = tokens(B, T, dtype=dtype), left_mask([0, 4, T])
    for arguments in ({}, {"mask": mask}, {"seq_idx": NUMBERS.expand(B, -1)}):
        expected, expected_state = plain(x, **arguments)
        out, state = shifted(x, **arguments)
        assert torch.equal(out, expected)
        assert torch.equal(shifted(x[:, :1], state=state)[0], plain(x[:, :1], state=expected_state)[0])


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_causality_by_gradient(options):
    """Token t sees the tokens in its window and, through the shift, those just before it; none later, none earlier."""
    layer = make(**options)
    x = tokens(1, T).requires_grad_()
    out, _ = layer(x)
    targets = layer.shift.targets
    reach = layer.shift.options.window - 1 if "k" in targets or "v" in targets else 0
    for t in range(T):
        (grad,) = torch.autograd.grad((out[0, t] * tokens(seed=t)).sum(), x, retain_graph=True)
        first = 0 if layer.sliding_window is None else max(0, t - layer.sliding_window + 1 - reach)
        for s in range(T):
            if s > t:
                assert not grad[0, s].any(), (t, s)
            elif s >= first:
                assert grad[0, s].any(), (t, s)
            elif "q" not in targets:
                assert not grad[0, s].any(), (t, s)


def test_dropout_only_while_training():
    plain, dropped = make(GQA), make(GQA, dropout=0.5)
    x = tokens(B, T)
    for arguments in ({}, {"mask": MASKS["left"]}):
        assert torch.equal(dropped(x, **arguments)[0], plain(x, **arguments)[0])
        dropped.train()
        torch.manual_seed(0)
        first, _ = dropped(x, **arguments)
        torch.manual_seed(0)
        again, _ = dropped(x, **arguments)
        assert torch.equal(first, again)
        assert not torch.equal(first, plain(x, **arguments)[0])
        dropped.eval()


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_autocast(options):
    layer = make(dtype=torch.float32, **options)
    x = tokens(B, T, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = layer(x, mask=MASKS["right"])
        again, _ = layer(x, state=state)
    assert out.dtype == again.dtype == state.k.dtype == torch.bfloat16
    close(out, layer(x, mask=MASKS["right"])[0].to(torch.bfloat16))


@pytest.mark.parametrize("targets", [("k", "v"), ("k",), ("q", "k", "v")], ids=str)
@pytest.mark.parametrize("heads", [MHA, GQA], ids=["mha", "gqa"])
def test_training_keeps_the_raw_tensors_of_a_shift_and_nothing_else(heads, targets):
    """docs/performance.md states this cost."""

    def kept(length, targets):
        layer, x = make(heads, shift_targets=targets), tokens(B, length)
        return bytes_kept(lambda: layer(x)[0], x, *layer.parameters())

    more = {length: kept(length, targets) - kept(length, ()) for length in (T, 4 * T)}
    of_a_token = sum(heads[0] if target == "q" else heads[1] for target in targets) * D * 8  # float64 has 8 bytes
    assert more[4 * T] - more[T] == B * 3 * T * of_a_token


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(reentrant):
    layer, x = make(GQA, qk_norm=True), tokens(B, T)
    expected = outcome(layer, x)
    x = x.clone().requires_grad_()
    out = checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant)
    out.square().sum().backward()
    same_bits([out, x.grad, *(p.grad for p in layer.parameters())], expected)


# Dynamo instantiates the autograd functions that it traces.
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("where", ["plain", "mask", "cu_seqlens", "seq_idx"])
def test_compiled_without_graph_breaks(where):
    layer = make(GQA, dtype=torch.float32, qk_norm=True, position_encoding="alibi" if where == "mask" else "rope")
    arguments = {
        "plain": {},
        "mask": {"mask": MASKS["left"][:1]},
        "cu_seqlens": {"cu_seqlens": BOUNDS},
        "seq_idx": {"seq_idx": NUMBERS.unsqueeze(0)},
    }[where]
    x, weights = tokens(1, T, dtype=torch.float32).requires_grad_(), tokens(1, T, seed=1, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    out, state = layer(x, **arguments)
    compiled_out, compiled_state = compiled(x, **arguments)
    close(compiled_out, out)
    close_all(gradients(compiled_out, weights, layer, x), gradients(out, weights, layer, x))
    if where in ("plain", "mask"):  # decode with both position encodings; no other option affects it
        with torch.no_grad():
            token = tokens(1, 1, seed=2, dtype=torch.float32)
            close(compiled(token, state=compiled_state.detach())[0], layer(token, state=state)[0])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name == "rope-gqa-window-lags" else pytest.mark.slow)
        for name, options in VARIED.items()
    ],
)
@torch.no_grad()
def test_exported_prefill_and_decoding(options):
    layer = make(dtype=torch.float32, **options)
    x, token = tokens(B, T, dtype=torch.float32), tokens(B, 1, seed=1, dtype=torch.float32)
    # min=7: the compiler treats a length that equals another size, such as 2 here, as a special case.
    prefill = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: torch.export.Dim("length", min=7)}})
    longer = tokens(B, T + 6, seed=2, dtype=torch.float32)
    out, state = prefill.module()(longer)
    expected, expected_state = layer(longer)
    close(out, expected)
    decode = torch.export.export(layer, (token,), {"state": state})
    close(decode.module()(token, state=state)[0], layer(token, state=expected_state)[0])
