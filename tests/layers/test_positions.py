"""Positions: rotary embedding, ALiBi, and which tokens a token attends to."""

import pytest
import torch

from kvshift.layers.positions import alibi_slopes, cached_positions, compute_positions, rotary_table, visible_keys
from kvshift.ops.rope import rotate
from tests.layers.attention_cases import GQA, MASKS, B, D, T, close, make, tokens
from tests.layers.attention_reference import reference_attention


def test_positions_rotate_queries_and_keys():
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
    new, seen = compute_positions(
        1, 4, torch.device("cpu"), seen=torch.tensor([2]), mask=torch.tensor([[False, True, False, True]])
    )
    assert seen.tolist() == [4]
    keys = past.followed_by(new)
    assert keys.rank.tolist() == [[-1, 0, 1, -1, 2, -1, 3]]
    everything = [True] * 7  # padding must see something, or its softmax is NaN on some devices
    assert visible_keys(new, keys, None).long().tolist() == [
        [everything, [0, 1, 1, 0, 1, 0, 0], everything, [0, 1, 1, 0, 1, 0, 1]]
    ]
    assert visible_keys(new, keys, 2).long().tolist() == [
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


@pytest.mark.parametrize("position_encoding", ["alibi", "none"])
def test_positions_without_rotation_are_refused(position_encoding):
    layer = make(position_encoding=position_encoding)
    with pytest.raises(ValueError, match=f'positions must be None with position_encoding="{position_encoding}"'):
        layer(tokens(B, T), positions=torch.zeros(B, T))
