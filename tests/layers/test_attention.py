"""One call of the layer: the formula, documents, padding, gradients, construction, errors."""

import itertools

import pytest
import torch

from kvshift import KVShiftAttention, ShiftOptions
from kvshift.layers.positions import alibi_slopes, cached_positions, count_tokens, rotary_table, rotate, visible
from tests.layers.attention_cases import GQA, MHA, VARIED, B, D, E, T, close, make, tokens, with_shift_options
from tests.layers.attention_reference import reference_attention

DOCUMENTS = [3, 0, 1, 5, 2]
BOUNDS = torch.tensor([0, *itertools.accumulate(DOCUMENTS)], dtype=torch.int32)
# Document numbers may fall, come again, and be negative: only a change counts.
NUMBERS = torch.tensor([7] * 3 + [-1] + [7] * 5 + [4] * 2)


def gradients(out, weights, layer, x):
    wanted = [x, *layer.parameters()]
    return torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True)


def close_all(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        close(a, e)


@pytest.mark.parametrize("targets", [(), ("k",), ("k", "v"), ("q", "k", "v")], ids=lambda t: "".join(t) or "plain")
@pytest.mark.parametrize("sliding_window", [None, 4])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["raw", "normed"])
@pytest.mark.parametrize("position_encoding", ["rope", "alibi", "none"])
@pytest.mark.parametrize("heads", [MHA, GQA], ids=["mha", "gqa"])
def test_output_is_that_of_the_reference(heads, position_encoding, qk_norm, sliding_window, targets):
    layer = make(
        heads,
        position_encoding=position_encoding,
        qk_norm=qk_norm,
        sliding_window=sliding_window,
        shift_targets=targets,
    )
    x = tokens(2, T)
    with torch.no_grad():
        close(layer(x)[0], torch.stack([reference_attention(layer, row) for row in x]))


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("position_encoding", ["rope", "alibi"])
def test_gradients_are_those_of_the_reference(position_encoding, window):
    layer = make(
        GQA,
        position_encoding=position_encoding,
        qk_norm=True,
        bias=True,
        shift_targets=("q", "k", "v"),
        shift_window=window,
    )
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("constraint", ["free", "clamp"])
@pytest.mark.parametrize("targets", [("k", "v"), ("q", "k", "v"), ("v",)], ids="".join)
@pytest.mark.parametrize("window", [2, 3])
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
    """Token t sees the tokens in its window, and through the shift those before it; nothing later, nothing earlier."""
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


@pytest.mark.parametrize("boundaries", ["cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_packed_documents_equal_separate_ones(options, boundaries):
    layer = make(**options)
    x, weights = tokens(1, T).requires_grad_(), tokens(1, T, seed=1)
    where = {"cu_seqlens": BOUNDS} if boundaries == "cu_seqlens" else {"seq_idx": NUMBERS.unsqueeze(0)}
    packed, state = layer(x, **where)
    assert state.sequences == (len(DOCUMENTS) if boundaries == "cu_seqlens" else 1)
    separate = torch.cat([layer(part)[0] for part in x.split(DOCUMENTS, dim=1)], dim=1)
    close(packed, separate)
    close_all(gradients(packed, weights, layer, x), gradients(separate, weights, layer, x))


def test_rows_of_a_batch_have_documents_of_their_own():
    layer = make(GQA, sliding_window=5)
    lengths = [[4, 7], [11], [1, 2, 8]]
    x = tokens(B, T)
    seq_idx = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    expected = [torch.cat([layer(part)[0] for part in x[b : b + 1].split(lengths[b], dim=1)], dim=1) for b in range(B)]
    close(layer(x, seq_idx=seq_idx)[0], torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("boundaries", ["cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_no_bit_of_a_document_depends_on_the_one_before(options, boundaries, dtype):
    layer = make(dtype=dtype, **options)
    where = {"cu_seqlens": BOUNDS} if boundaries == "cu_seqlens" else {"seq_idx": NUMBERS.unsqueeze(0)}
    results = []
    for changed in (False, True):
        x = tokens(1, T, dtype=dtype)
        if changed:
            x[:, 8] = 100 * tokens(1, seed=9, dtype=dtype)  # the last token of the fourth document
        x.requires_grad_()
        out, _ = layer(x, **where)
        (grad,) = torch.autograd.grad((out * tokens(1, T, seed=1, dtype=dtype)).sum(), x)
        results.append((out, grad))
    (out, grad), (changed_out, changed_grad) = results
    for before, after in ((out, changed_out), (grad, changed_grad)):
        assert torch.equal(before[:, 9:], after[:, 9:])
        assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(out[:, 8], changed_out[:, 8])


def left_mask(pads: list[int]) -> torch.Tensor:
    return torch.arange(T) >= torch.tensor(pads).unsqueeze(1)


MASKS = {
    "left": left_mask([0, 4, 10]),
    "right": left_mask([0, 4, 10]).flip(1),
    "between": torch.tensor([[1] * T, [0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0], [0] * T], dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_padding_of_any_content_is_as_if_it_were_not_there(options, mask):
    layer = make(**options)
    padding = torch.where(mask, 0.0, torch.nan).unsqueeze(2)
    x, weights = (tokens(B, T) + padding).requires_grad_(), tokens(B, T, seed=1)
    out, _ = layer(x, mask=mask)
    assert not out[~mask].any()
    alone = torch.zeros_like(out)
    for b in range(B):
        alone[b, mask[b]] = layer(x[b : b + 1, mask[b]])[0].squeeze(0)
    close(out, alone)
    close_all(gradients(out, weights, layer, x), gradients(alone, weights, layer, x))


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_padding_inside_documents(options):
    layer = make(**options)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0]], dtype=torch.bool)
    # On padding the document's number may be anything.
    numbers = torch.where(mask[0], NUMBERS, torch.tensor([5, 0, 0, 3, 0, -8, 0, 0, 2, 0, 7]))
    x = torch.where(mask.unsqueeze(2), tokens(1, T), torch.inf)
    expected = torch.zeros_like(x)
    for start, end in itertools.pairwise(BOUNDS.tolist()):
        real = [t for t in range(start, end) if mask[0, t]]
        expected[:, real] = layer(x[:, real])[0]
    close(layer(x, mask=mask, cu_seqlens=BOUNDS)[0], expected)
    # Without its one token, a document between two others is not there: here both are numbered 7.
    assert not mask[0, 3]
    joined = [1, 2, 4, 6, 7]
    expected[:, joined] = layer(x[:, joined])[0]
    close(layer(x, mask=mask, seq_idx=numbers.unsqueeze(0))[0], expected)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_short_rows(options, length):
    layer = make(**options)
    x = tokens(B, length)
    expected = torch.zeros(B, 0, E, dtype=x.dtype)
    if length:
        expected = torch.stack([reference_attention(layer, row) for row in x])
    for where in (
        {},
        {"mask": torch.ones(B, length, dtype=torch.bool)},
        {"seq_idx": torch.zeros(B, length, dtype=torch.int32)},
    ):
        out, state = layer(x, **where)
        close(out, expected)
        assert state.seen.tolist() == [length] * B
    out, state = layer(x[:1], cu_seqlens=torch.tensor([0, 0, length]))
    close(out, expected[:1])
    assert state.seen.tolist() == [0, length]


def test_positions_turn_queries_and_keys():
    layer = make(GQA)
    x = tokens(2, T)
    positions = torch.tensor([[5, 0, 3, 3, 8, 2, 1, 40, 7, 6, 9], list(range(100, 100 + T))])
    expected = [reference_attention(layer, row, where) for row, where in zip(x, positions.tolist(), strict=True)]
    close(layer(x, positions=positions)[0], torch.stack(expected))
    stretched = positions.double() / 8  # position interpolation
    expected = [reference_attention(layer, row, where) for row, where in zip(x, stretched.tolist(), strict=True)]
    close(layer(x, positions=stretched)[0], torch.stack(expected))


def test_counted_positions_are_the_default():
    layer = make(dtype=torch.float32)
    x = tokens(B, T, dtype=torch.float32)
    counted = torch.arange(T).expand(B, -1)
    assert torch.equal(layer(x, positions=counted)[0], layer(x)[0])
    mask = MASKS["between"]
    real = mask.cumsum(1) - 1
    assert torch.equal(layer(x, positions=real, mask=mask)[0], layer(x, mask=mask)[0])


def test_who_sees_whom():
    """Cached: one padded column and ranks 0, 1. New: padding, rank 2, padding, rank 3."""
    past = cached_positions(torch.tensor([2]), 3, packed=False)
    new, seen = count_tokens(
        1, 4, torch.device("cpu"), seen=torch.tensor([2]), mask=torch.tensor([[False, True, False, True]])
    )
    assert seen.tolist() == [4]
    keys = past.followed_by(new)
    assert keys.rank.tolist() == [[-1, 0, 1, -1, 2, -1, 3]]
    everything = [True] * 7  # padding sees something, or its softmax would be NaN on some devices
    assert visible(new, keys, None).long().tolist() == [
        [everything, [0, 1, 1, 0, 1, 0, 0], everything, [0, 1, 1, 0, 1, 0, 1]]
    ]
    assert visible(new, keys, 2).long().tolist() == [
        [everything, [0, 0, 1, 0, 1, 0, 0], everything, [0, 0, 0, 0, 1, 0, 1]]
    ]


def test_slopes_of_alibi():
    assert alibi_slopes(1) == [2**-8]
    assert alibi_slopes(4) == [2**-2, 2**-4, 2**-6, 2**-8]
    assert alibi_slopes(8) == [2**-n for n in range(1, 9)]
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert alibi_slopes(12) == [*(2**-n for n in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]


def test_rotation_is_that_of_llama():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=3 * D, num_attention_heads=3, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    x = torch.randn(2, T, 3, D, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(2 * T).view(2, T)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x, rotary_table(positions, D, 500.0, x.dtype)), expected, rtol=0, atol=2**-20)


def test_rotation_by_hand():
    x = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64).view(1, 1, 1, 4)
    rotated = rotate(x, rotary_table(torch.tensor([[3]]), 4, 100.0, x.dtype)).flatten()
    angles = torch.tensor([3.0, 0.3], dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    close(rotated, torch.stack([cos[0], -2 * sin[1], sin[0], 2 * cos[1]]))


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


# While it traces an autograd function, dynamo makes an instance of it.
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
    if where != "cu_seqlens":
        with torch.no_grad():
            token = tokens(1, 1, seed=2, dtype=torch.float32)
            close(compiled(token, state=compiled_state.detach())[0], layer(token, state=state)[0])


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
@torch.no_grad()
def test_exported_prefill_and_decoding(options):
    layer = make(dtype=torch.float32, **options)
    x, token = tokens(B, T, dtype=torch.float32), tokens(B, 1, seed=1, dtype=torch.float32)
    # 7: the compiler takes lengths at which two sizes agree, such as length 2 here, for cases of their own
    prefill = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: torch.export.Dim("length", min=7)}})
    longer = tokens(B, T + 6, seed=2, dtype=torch.float32)
    out, state = prefill.module()(longer)
    expected, expected_state = layer(longer)
    close(out, expected)
    decode = torch.export.export(layer, (token,), {"state": state})
    close(decode.module()(token, state=state)[0], layer(token, state=expected_state)[0])


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, {"shift.alpha": (2, 2), "shift.beta": (2, 2)}),
        ({"shift_targets": ()}, {}),
        (
            {"shift_targets": ("q", "k"), "shift_window": 3, "qk_norm": True, "bias": True},
            {
                "shift.alpha": (2, 3),
                "shift.gamma": (6, 3),
                "q_norm.weight": (D,),
                "k_norm.weight": (D,),
                "q_proj.bias": (6 * D,),
                "k_proj.bias": (2 * D,),
                "v_proj.bias": (2 * D,),
                "o_proj.bias": (E,),
            },
        ),
    ],
    ids=["default", "plain", "all"],
)
def test_state_dict_keys_are_frozen(options, extra):
    layer = KVShiftAttention(E, *GQA, head_dim=D, **with_shift_options(options))
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "q_proj.weight": (6 * D, E),
        "k_proj.weight": (2 * D, E),
        "v_proj.weight": (2 * D, E),
        "o_proj.weight": (E, 6 * D),
        **extra,
    }


def test_defaults():
    layer = KVShiftAttention(30, 5)
    assert (layer.num_kv_heads, layer.head_dim, layer.shift.targets) == (5, 6, ("k", "v"))
    assert repr(layer).startswith(
        "KVShiftAttention(\n  embed_dim=30, num_heads=5, num_kv_heads=5, head_dim=6, position_encoding='rope', "
        "sliding_window=None, dropout=0.0, max_rollback=0"
    )


def test_dtype_and_device():
    layer = KVShiftAttention(E, *GQA, head_dim=D, qk_norm=True, dtype=torch.bfloat16, device="cpu")
    dtypes = {name: x.dtype for name, x in layer.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == {"shift.alpha", "shift.beta"}
    assert dtypes["shift.alpha"] == torch.float32


def test_meta_device_and_same_seed_same_bits():
    options = {"head_dim": D, "qk_norm": True, "bias": True, "shift_options": ShiftOptions(targets=("q", "k", "v"))}
    torch.manual_seed(0)
    expected = KVShiftAttention(E, *GQA, **options)
    expected.reset_parameters()
    with torch.device("meta"):
        layer = KVShiftAttention(E, *GQA, **options)
    assert {x.device.type for x in layer.parameters()} == {"meta"}
    assert not list(layer.buffers())
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    for _ in range(2):  # once for what the constructor of `expected` drew
        layer.reset_parameters()
    torch.testing.assert_close(layer.state_dict(), expected.state_dict(), rtol=0, atol=0)
    out, _ = layer(tokens(B, T, dtype=torch.float32))
    assert out.shape == (B, T, E)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 0}, "embed_dim must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_kv_heads": -1}, "num_kv_heads must be at least 1, got -1"),
        ({"num_kv_heads": 4}, "num_kv_heads must divide num_heads, 6; got 4"),
        ({"head_dim": None}, "embed_dim must be a multiple of num_heads, 6, or head_dim given; got 37"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"head_dim": 7}, 'head_dim must be even with position_encoding="rope", got 7'),
        ({"position_encoding": "sin"}, 'position_encoding must be "rope", "alibi" or "none", got \'sin\''),
        ({"rope_base": 0.0}, r"rope_base must be above 0, got 0\.0"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be at least 0 and below 1, got 1\.0"),
        ({"dropout": -0.1}, r"dropout must be at least 0 and below 1, got -0\.1"),
        ({"max_rollback": -1}, "max_rollback must be 0 or more, got -1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        KVShiftAttention(**{"embed_dim": E, "num_heads": 6, "head_dim": D, **options})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": tokens(B, T)[..., :-1]}, ValueError, r"x must be \(batch, positions, 37\), got \(3, 11, 36\)"),
        ({"x": tokens(T)}, ValueError, r"x must be \(batch, positions, 37\), got \(11, 37\)"),
        ({"mask": torch.ones(B, T)}, TypeError, r"mask must be of dtype torch\.bool"),
        ({"mask": torch.ones(B, 1, dtype=torch.bool)}, ValueError, r"mask must be \(3, 11\)"),
        ({"seq_idx": torch.ones(B, T)}, TypeError, "seq_idx must be of an integer dtype"),
        ({"cu_seqlens": torch.tensor([0, T])}, ValueError, "the batch must be 1 row"),
        ({"x": tokens(1, T), "cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens must rise from 0 to 11"),
        (
            {"x": tokens(1, T), "cu_seqlens": torch.tensor([0, T]), "seq_idx": torch.zeros(1, T, dtype=torch.int32)},
            ValueError,
            "cu_seqlens and seq_idx both name the documents",
        ),
        ({"positions": torch.arange(T)}, ValueError, r"positions must be \(3, 11\) on cpu, got \(11,\) on cpu"),
        ({"state": (1, 2)}, TypeError, "state must be an AttentionState or None, got tuple"),
    ],
)
@pytest.mark.parametrize("targets", [(), ("k", "v")], ids=["plain", "shifted"])
def test_bad_arguments(arguments, error, message, targets):
    with pytest.raises(error, match=message):
        make(shift_targets=targets)(**{"x": tokens(B, T), **arguments})


@pytest.mark.parametrize("position_encoding", ["alibi", "none"])
def test_positions_without_rotation_are_refused(position_encoding):
    layer = make(position_encoding=position_encoding)
    with pytest.raises(ValueError, match=f'positions must be None with position_encoding="{position_encoding}"'):
        layer(tokens(B, T), positions=torch.zeros(B, T))
