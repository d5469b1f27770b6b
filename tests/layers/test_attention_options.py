"""Construction of the attention layer: parameter names, defaults, dtypes, devices and rejected options."""

import pytest
import torch

from kvshift import KVShiftAttention, ShiftOptions
from tests.layers.attention_cases import GQA, B, D, E, T, make, tokens, with_shift_options


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
    for _ in range(2):  # once for the numbers that the constructor of `expected` drew
        layer.reset_parameters()
    torch.testing.assert_close(layer.state_dict(), expected.state_dict(), rtol=0, atol=0)
    out, _ = layer(tokens(B, T, dtype=torch.float32))
    assert out.shape == (B, T, E)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("embed_dim", 0, "at least 1"),
        ("num_heads", 0, "at least 1"),
        ("num_kv_heads", -1, "at least 1"),
        ("num_kv_heads", 4, "divide num_heads, 6"),
        ("head_dim", 0, "at least 1"),
        ("head_dim", 7, 'even with position_encoding="rope"'),
        ("position_encoding", "sin", '"rope", "alibi" or "none"'),
        ("rope_base", 0.0, "above 0"),
        ("sliding_window", 0, "at least 1"),
        ("dropout", 1.0, "at least 0 and below 1"),
        ("dropout", -0.1, "at least 0 and below 1"),
        ("max_rollback", -1, "0 or more"),
    ],
)
def test_a_bad_option_is_named(field, value, words):
    with pytest.raises(ValueError, match=f"^{field} must (be )?{words}[,;] got {value!r}$"):
        KVShiftAttention(**{"embed_dim": E, "num_heads": 6, "head_dim": D, field: value})


def test_heads_need_a_size():
    with pytest.raises(ValueError, match=r"embed_dim must be a multiple of num_heads, 6, unless head_dim .* got 37"):
        KVShiftAttention(E, 6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": tokens(B, T)[..., :-1]}, ValueError, r"x must be \(batch, positions, 37\), got \(3, 11, 36\)"),
        ({"x": tokens(T)}, ValueError, r"x must be \(batch, positions, 37\), got \(11, 37\)"),
        ({"mask": torch.ones(B, 1, dtype=torch.bool)}, ValueError, r"mask must be \(3, 11\)"),
        ({"seq_idx": torch.ones(B, T)}, TypeError, "seq_idx must be of an integer dtype"),
        ({"x": tokens(1, T), "cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens must be non-decreasing"),
        ({"positions": torch.arange(T)}, ValueError, r"positions must be \(3, 11\) on cpu, got \(11,\) on cpu"),
        ({"state": (1, 2)}, TypeError, "state must be an AttentionState or None, got tuple"),
    ],
)
@pytest.mark.parametrize("targets", [(), ("k", "v")], ids=["plain", "shifted"])
def test_bad_arguments(arguments, error, message, targets):
    with pytest.raises(error, match=message):
        make(shift_targets=targets)(**{"x": tokens(B, T), **arguments})
