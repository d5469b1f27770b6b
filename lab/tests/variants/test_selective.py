"""Selective attention, whole and in blocks, against a slow loop of its formula and against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift_lab.variants.building import build_model, describe
from kvshift_lab.variants.by_name import with_variant
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.selective_attention import selective_attention, selective_attention_full
from kvshift_lab.variants.small_gpt2 import GPT2Options

from ..benchmarks.scripts import script
from .layouts import LAYOUTS, given

HEADS, KV_HEADS, SIZE, SCALING = 6, 3, 5, 0.4
every_layout = pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS.keys())
both_axes = pytest.mark.parametrize("axis", ["query", "key"])


def heads(batch: int, length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Return queries, keys and values with scores of size 2: large enough that F nearly removes some keys."""
    chance = torch.Generator().manual_seed(seed)
    shapes = [(batch, number, length, SIZE) for number in (HEADS, KV_HEADS, KV_HEADS)]
    return [(torch.randn(shape, generator=chance, dtype=torch.float64) * 1.5).to(dtype) for shape in shapes]


def by_loop(q: Tensor, k: Tensor, v: Tensor, axis: str, rows: list[list[int | None]]) -> Tensor:
    """Compute token by token in each row, among the tokens of one document. Padding gives 0."""
    out = torch.zeros_like(q)
    for b, row in enumerate(rows):
        for document in {number for number in row if number is not None}:
            places = [t for t, number in enumerate(row) if number == document]
            n = len(places)
            z = [
                [[float(q[b, h, s] @ k[b, h // 2, t]) * SCALING for t in places] for s in places] for h in range(HEADS)
            ]
            chosen = [[max(z[0][i][j], 0.0) if 0 < j < i else 0.0 for j in range(n)] for i in range(n)]
            for i in range(n):
                if axis == "query":
                    less = [sum(chosen[m][j] for m in range(i)) for j in range(i + 1)]
                else:
                    less = [sum(chosen[i - 1][: j + 1]) if i else 0.0 for j in range(i + 1)]
                for h in range(HEADS):
                    weights = torch.tensor([z[h][i][j] - less[j] for j in range(i + 1)], dtype=q.dtype).softmax(0)
                    out[b, h, places[i]] = sum(w * v[b, h // 2, places[j]] for j, w in enumerate(weights))
    return out


@both_axes
@every_layout
def test_both_forms_by_the_loop(rows: list[list[int | None]], axis: Any) -> None:
    q, k, v = heads(5, 7)
    where = given(rows)
    real = where["mask"].unsqueeze(1).expand(-1, HEADS, -1)
    expected = by_loop(q, k, v, axis, rows)[real]
    whole, weights = selective_attention_full(q, k, v, scaling=SCALING, axis=axis, **where)
    torch.testing.assert_close(whole[real], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5, HEADS, 7, dtype=q.dtype), rtol=0, atol=1e-12)
    for block in (1, 2, 3, 7, 64):
        got = selective_attention(q, k, v, scaling=SCALING, axis=axis, block=block, **where)
        torch.testing.assert_close(got[real], expected, rtol=0, atol=1e-12)
        assert got.isfinite().all()


def test_a_case_by_hand() -> None:
    """Queries are 0, 2, 2, 2, 2 and keys 1: token 2 chooses token 1 by 2, token 3 chooses tokens 1 and 2 by 2."""
    q = torch.tensor([0.0, 2.0, 2.0, 2.0, 2.0]).view(1, 1, 5, 1)
    k = v = torch.ones(1, 1, 5, 1)
    _, weights = selective_attention_full(q, k, v, scaling=1.0)
    less = torch.tensor([[0.0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 2, 0, 0]])
    for i in range(5):
        torch.testing.assert_close(weights[0, 0, i, : i + 1], (-less[i, : i + 1]).softmax(0))
    _, weights = selective_attention_full(q, k, v, scaling=1.0, axis="key")
    less = torch.tensor([[0.0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 2, 2, 2, 0], [0, 2, 4, 4, 4]])
    for i in range(5):
        torch.testing.assert_close(weights[0, 0, i, : i + 1], (-less[i, : i + 1]).softmax(0))


@both_axes
@every_layout
def test_gradients_of_blocks(rows: list[list[int | None]], axis: Any) -> None:
    """The gradients equal those of autograd for the whole form, in double precision."""
    weight = torch.randn(5, HEADS, 7, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = [x.requires_grad_() for x in heads(5, 7, seed=1)]
    where: Any = {"scaling": SCALING, "axis": axis, **given(rows)}
    expected = torch.autograd.grad((selective_attention_full(*inputs, **where)[0] * weight).sum(), inputs)
    for block in (1, 2, 3, 7, 64):
        got = torch.autograd.grad((selective_attention(*inputs, block=block, **where) * weight).sum(), inputs)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@both_axes
@pytest.mark.parametrize("length", [1, 64, 65, 331])
def test_blocks_are_the_whole_in_float32(length: int, axis: Any) -> None:
    """Output and gradients are equal for one token, one block, one token more, and several blocks."""
    seen = torch.arange(length).expand(2, -1)
    where = {"mask": seen >= torch.tensor([[0], [min(7, length - 1)]]), "seq_idx": (seen > 0.6 * length).long()}
    results = []
    for function in (selective_attention, selective_attention_full):
        inputs = [x.requires_grad_() for x in heads(2, length, torch.float32)]
        output = function(*inputs, scaling=SCALING, axis=axis, **where)
        output = output if isinstance(output, Tensor) else output[0]
        (output * torch.arange(output.numel()).view_as(output).cos()).sum().backward()
        results.append([output, *(x.grad for x in inputs)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@both_axes
def test_backward_twice_and_the_same_bits(axis: Any) -> None:
    inputs = [x.requires_grad_() for x in heads(2, 131, torch.float32)]
    output = selective_attention(*inputs, scaling=SCALING, axis=axis).square().sum()
    first = torch.autograd.grad(output, inputs, retain_graph=True)
    again = torch.autograd.grad(output, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@both_axes
def test_blocks_have_no_second_derivative(axis: Any) -> None:
    """This includes `autograd.grad` of an input, whose graph leaves out everything that is not on the way to it."""
    q, k, v = (x.requires_grad_() for x in heads(1, 5))
    out = selective_attention(q, k, v, scaling=0.3, axis=axis)
    with pytest.raises(RuntimeError, match=r"no second derivative; selective_attention_full has one"):
        torch.autograd.grad(out.pow(3).sum(), q, create_graph=True)


@both_axes
def test_blocks_in_bfloat16(axis: Any) -> None:
    """The blocks are as near to double precision as the whole form is, also under autocast."""
    inputs = heads(2, 131, torch.bfloat16)
    exact, _ = selective_attention_full(*(x.double() for x in inputs), scaling=SCALING, axis=axis)
    whole, _ = selective_attention_full(*inputs, scaling=SCALING, axis=axis)
    blocks = selective_attention(*inputs, scaling=SCALING, axis=axis)
    with torch.autocast("cpu", torch.bfloat16):
        cast = selective_attention(*(x.float() for x in inputs), scaling=SCALING, axis=axis)
    assert whole.dtype == blocks.dtype == cast.dtype == torch.bfloat16
    assert torch.equal(cast, blocks)
    assert (blocks.double() - exact).square().mean() <= 1.1 * (whole.double() - exact).square().mean()


@both_axes
def test_memory_grows_with_the_context(axis: Any) -> None:
    """Each further 256 tokens raise the peak of both passes equally; quadratic growth would give a ratio of 1.4."""
    peaks = []
    for length in (512, 768, 1024):
        inputs = [x.requires_grad_() for x in heads(1, length, torch.float32)]
        step = lambda inputs=inputs: selective_attention(*inputs, scaling=SCALING, axis=axis).sum().backward()  # noqa: E731
        step()
        peaks.append(script("allocated").peak_bytes(step, torch.device("cpu")))
    assert abs((peaks[2] - peaks[1]) / (peaks[1] - peaks[0]) - 1) < 0.05


def build(name: str, size: Any) -> Any:
    made = with_variant(size, name)
    return build_model(describe(made, vocab_size=31, length=41), seed=0, variant=name)


@pytest.mark.parametrize(("name", "axis"), [("selective", "query"), ("selective-key", "key")])
def test_in_a_model_it_is_given_finished_queries_and_keys(name: str, axis: Any) -> None:
    size = ModelConfig(hidden_size=24, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=1, qk_norm=True)
    model, vanilla = build(name, size), build("vanilla", size)
    seen: dict[str, Any] = {}
    for each in (model, vanilla):
        attention = each.model.layers[0].self_attn
        attention.shift.register_forward_hook(lambda module, inputs, outputs: seen.update(heads=outputs[:3]))
        attention.o_proj.register_forward_pre_hook(lambda module, inputs: seen.update(output=inputs[0]))
        each(torch.arange(9).unsqueeze(0), use_cache=False)
        q, k, v = (x.transpose(1, 2) for x in seen["heads"])
        if each is vanilla:
            weights = ((q @ k.repeat_interleave(2, 1).mT) / 2).masked_fill(torch.ones(9, 9).triu(1).bool(), -1e9)
            expected = weights.softmax(-1) @ v.repeat_interleave(2, 1)
        else:
            expected = selective_attention_full(q, k, v, scaling=0.5, axis=axis)[0]
        torch.testing.assert_close(seen["output"], expected.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "size",
    [ModelConfig(hidden_size=24), GPT2Options(width=24, heads=3, head="linear", embedding_rows=None)],
    ids=["llama", "gpt2"],
)
def test_whole_with_weights_or_dropout(size: Any) -> None:
    model, ids = build("selective", size).eval(), torch.arange(9).unsqueeze(0)
    expected = model(ids, use_cache=False).logits
    model.config._attn_implementation = "eager"
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6)
    model.config._attn_implementation = "sdpa"
    for module in model.modules():
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.5
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert not torch.allclose(model.train()(ids, use_cache=False).logits, expected)
