"""What variants build on: lagged tokens, norms and rotary embedding, masks of tokens, another attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvshift import KVShift, kv_shift
from kvshift.models import extending
from kvshift.models.documents import create_masks
from kvshift.models.llama import KVShiftLlamaConfig
from tests.models.llama.tiny import SIZES, random_tokens, tiny_model

B, T, G, D = 2, 7, 3, 4
MASK = torch.tensor([[False, True, True, False, True, True, True], [True] * 5 + [False] * 2])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 5, 5, 5]])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("boundaries", [{}, {"mask": MASK}, {"seq_idx": DOCUMENTS, "mask": MASK}], ids=str)
def test_lagged_tokens_are_those_that_the_shift_mixes(rows, boundaries):
    x, before = normal(B, T, G, D), normal(B, rows, G, D, seed=1)
    lagged, after = extending.lagged_tokens(x, before, 3, max_rows=rows, **boundaries)
    for lag, tokens in enumerate(lagged):
        only = torch.eye(3, dtype=torch.float64)[lag].expand(G, 3)
        expected, state = extending.shift_tokens(
            x, only, state=before, max_rows=rows, backend="reference", **boundaries
        )
        where = MASK if "mask" in boundaries else torch.ones(B, T, dtype=torch.bool)
        assert torch.equal(tokens[where], expected[where])
        assert torch.equal(after, state)


def test_lagged_tokens_of_another_dtype_leave_the_rows():
    x, before = normal(B, T, G, D).bfloat16(), normal(B, 1, G, D, seed=1).bfloat16()
    lagged, after = extending.lagged_tokens(x, before, 2, max_rows=1, dtype=torch.float32)
    assert [tokens.dtype for tokens in lagged] == [torch.float32] * 2
    assert torch.equal(after, x[:, -1:])
    assert torch.equal(lagged[1], torch.cat([before, x[:, :-1]], dim=1).float())


def test_norm_and_rotate_are_what_follows_the_shift():
    q, k, v = (normal(B, T, G, D, seed=seed) for seed in range(3))
    rotary = (normal(1, T, 1, D // 2).cos(), normal(1, T, 1, D // 2).sin())
    norms = nn.RMSNorm(D, dtype=torch.float64), nn.RMSNorm(D, dtype=torch.float64)
    shift = KVShift(G).double()
    expected = shift(q, k, v, rotary=rotary, norms=norms)
    k_hat, *_ = kv_shift(k, v, shift.alpha, shift.beta)
    for got, wanted in zip(extending.norm_and_rotate(q, k_hat, rotary=rotary, norms=norms), expected, strict=False):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert extending.norm_and_rotate(q, k) == (q, k)


@pytest.mark.parametrize("named", ["", "seq_idx", "position_ids", "cu_seq_lens"])
def test_masks_of_tokens_are_those_of_all_masks(named):
    config = KVShiftLlamaConfig(**SIZES, attn_implementation="sdpa")
    batch = 1 if named == "cu_seq_lens" else B
    embeds, mask = torch.zeros(batch, T, 8), None if named == "cu_seq_lens" else MASK.long()
    arguments = {"seq_idx": DOCUMENTS, "cu_seq_lens": torch.tensor([0, 3, 7])}
    arguments = {key: value for key, value in arguments.items() if key == named}
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]) if named == "position_ids" else None
    expected = create_masks(config, embeds, mask, None, positions, **arguments)
    got = extending.create_token_masks(embeds, mask, positions, **arguments)
    assert got.keys() == expected.keys()
    assert got["attention"] is None
    for key in ("padding", "documents", "offsets"):
        assert (got[key] is None) == (expected[key] is None)
        assert got[key] is None or torch.equal(got[key], expected[key])


def test_an_attention_that_overrides_attend_gets_what_is_cached():
    model, seen = tiny_model(), []

    class Recorded(extending.KVShiftLlamaAttention):
        def attend(self, query, key, value, **options):
            seen.append((query.shape[2], key.shape[2], options["shift_seq_idx"]))
            return super().attend(query, key, value, **options)

    ids = random_tokens(1, 6)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    model.model.layers[0].self_attn.__class__ = Recorded
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)
    assert seen == [(6, 6, None), (1, 7, None), (1, 8, None)]
