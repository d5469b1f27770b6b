"""The partial key offset against a slow loop of its formula, alone and in a model."""

from __future__ import annotations

import pytest
import torch

from kvshift.lab.variants.building import build_model, describe
from kvshift.lab.variants.by_name import with_variant
from kvshift.lab.variants.key_offset import offset_keys
from kvshift.lab.variants.model_config import ModelConfig

from ...covering import covering
from .layouts import LAYOUTS, before, given

HEADS, SIZE = 3, 20


def keys(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, 7, HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_loop(k: torch.Tensor, rows: list[list[int | None]], *, whole: bool = False) -> torch.Tensor:
    y = k.clone()
    for b, row in enumerate(rows):
        for t in range(len(row)):
            s = before(row, t)
            slow = range(20) if whole else [*range(5, 10), *range(15, 20)]
            for d in slow if s is not None else []:
                y[b, t, :, d] = k[b, s, :, d]
    return y


@covering(rows=LAYOUTS, whole={"half": False, "whole": True}, dtype=[torch.float32, torch.bfloat16, torch.float64])
def test_by_the_loop_bit_for_bit(rows: list[list[int | None]], dtype: torch.dtype, whole: bool) -> None:
    k = keys(dtype)
    kept = k.clone()
    got, _ = offset_keys(k, whole=whole, **given(rows))
    real = given(rows)["mask"]
    assert got.dtype == dtype
    assert torch.equal(got[real], by_loop(k, rows, whole=whole)[real])
    assert torch.equal(k, kept)


@pytest.mark.parametrize("whole", [False, True], ids=["half", "whole"])
def test_in_any_two_pieces_bit_for_bit(whole: bool) -> None:
    """Padding on the left too, whole first pieces of it: a sequence begins with its first token."""
    k, rows = keys(), [[0] * 7, [None, None, 0, 0, 0, 0, 0], [None] * 6 + [0], [None] * 5 + [0, 0], [0] * 7]
    where, expected = given(rows), by_loop(k, rows, whole=whole)
    for cut in range(8):
        first, state = offset_keys(k[:, :cut], whole=whole, mask=where["mask"][:, :cut])
        second, _ = offset_keys(k[:, cut:], state, whole=whole, mask=where["mask"][:, cut:])
        got = torch.cat([first, second], dim=1)
        assert torch.equal(got[where["mask"]], expected[where["mask"]])


def test_of_a_view_whose_base_stays() -> None:
    base = torch.randn(5, 7, 2 * HEADS * SIZE, generator=torch.Generator().manual_seed(2))
    kept = base.clone()
    view = base[..., HEADS * SIZE :].view(5, 7, HEADS, SIZE)
    assert torch.equal(offset_keys(view)[0], by_loop(view.clone(), LAYOUTS["whole"]))
    assert torch.equal(base, kept)


def test_gradients() -> None:
    k = keys(torch.float64)[:3, :4, :1, :4].requires_grad_()
    rows = [row[:4] for row in LAYOUTS["padding"][:3]]
    assert torch.autograd.gradcheck(lambda k: offset_keys(k, **given(rows))[0], (k,))


def test_in_a_model_offset_keys_are_rotated() -> None:
    options = with_variant(ModelConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=1), "key-offset")
    model = build_model(describe(options, vocab_size=31, length=9), seed=0, variant="key-offset").double()
    seen = {}
    model.model.layers[0].self_attn.shift.register_forward_hook(
        lambda module, inputs, outputs: seen.update(before=inputs[1], after=outputs[1])
    )
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    model(torch.arange(7).unsqueeze(0), position_ids=positions)
    cos, sin = model.model.rotary_emb(seen["before"], positions)
    offset, _ = offset_keys(seen["before"], seq_idx=torch.tensor([[0, 0, 0, 0, 1, 1, 1]]))
    half = torch.cat([-offset[..., 6:], offset[..., :6]], dim=-1)
    rotated = offset * cos.unsqueeze(2) + half * sin.unsqueeze(2)
    torch.testing.assert_close(seen["after"], rotated.to(seen["after"].dtype), rtol=1e-6, atol=1e-6)
