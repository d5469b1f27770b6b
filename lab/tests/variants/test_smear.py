"""The smear against a slow loop of its formula, alone and in a model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvshift_lab.variants.building import build_model, describe
from kvshift_lab.variants.by_name import with_variant
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.smear import Smear

from .layouts import LAYOUTS, before, given

every_layout = pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS.keys())
WIDTH = 17


def smear(width: int = WIDTH) -> Smear:
    made = Smear(width)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        made.gate.copy_(torch.randn(made.gate.shape, generator=chance))
        made.scale.fill_(-0.7)
    return made


def by_loop(made: Smear, x: Any, rows: list[list[int | None]]) -> torch.Tensor:
    y = x.double().clone()
    for b, row in enumerate(rows):
        for t in range(len(row)):
            s = before(row, t)
            if s is not None:
                read = sum(w.item() * v.item() for w, v in zip(made.gate, x[b, t], strict=False))
                y[b, t] += made.scale.item() / (1 + math.exp(-read)) * x[b, s].double()
    return y


def embeddings(dtype: torch.dtype = torch.float32, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(5, 7, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2**-8)])
@every_layout
def test_by_the_loop(rows: list[list[int | None]], dtype: torch.dtype, rtol: float) -> None:
    """In bfloat16 the bound is half a unit in the last of 8 bits. The weights have the same dtype."""
    x, made = embeddings(dtype), smear().to(dtype)
    kept = x.clone()
    got = made(x, **given(rows))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), by_loop(made, x, rows), rtol=rtol, atol=min(rtol, 1e-6))
    assert torch.equal(x, kept)


def test_the_gate_reads_twelve_numbers_at_most() -> None:
    assert [smear(width).gate.shape[0] for width in (5, 12, 17)] == [5, 12, 12]
    x, made = embeddings(width=5), smear(5)
    rows = LAYOUTS["whole"]
    torch.testing.assert_close(made(x).double(), by_loop(made, x, rows), rtol=1e-6, atol=1e-6)


def test_gradients() -> None:
    made, x = smear(3).double(), embeddings(torch.float64, 3)[:, :, :3].requires_grad_()

    def smeared(x: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        parameters = {"gate": gate, "scale": scale}
        return torch.func.functional_call(made, parameters, (x,), given(LAYOUTS["padding"]))

    assert torch.autograd.gradcheck(smeared, (x, made.gate, made.scale))


def test_a_model_is_its_vanilla_counterpart_over_smeared_embeddings() -> None:
    options = ModelConfig(hidden_size=24, num_attention_heads=2)
    ours, vanilla = (
        build_model(describe(made, vocab_size=31, length=9), seed=0, variant=made.variant)
        for made in (with_variant(options, name) for name in ("smear", "vanilla"))
    )
    ids = torch.arange(9).unsqueeze(0)
    assert torch.equal(ours(ids).logits, vanilla(ids).logits)  # the smear starts at zero
    body: Any = ours.model
    body.smear = smear(24)
    rows = [[0, 0, 0, 0, 0, 1, 1, 1, 1]]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    expected = by_loop(body.smear, vanilla.model.embed_tokens(ids), rows).float()
    got = ours(ids, position_ids=positions).logits
    there = vanilla(inputs_embeds=expected, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, there, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours(ids).logits, got, atol=1e-4)
