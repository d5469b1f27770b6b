"""The bidirectional shift against a slow loop, and encoders with it: each document gives what it gives alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvshift_lab.core.errors import LabError
from kvshift_lab.variants.bidirectional import EncoderOptions, shift_both_ways
from kvshift_lab.variants.building import build_model, describe
from kvshift_lab.variants.by_name import with_variant
from kvshift_lab.variants.uncached import decodes_with_cache

from .layouts import LAYOUTS, before, given

DIRECTIONS = ("previous", "next", "both")
every_layout = pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS.keys())
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def options_of(direction: Any, **changes: Any) -> EncoderOptions:
    size: Any = {"width": 16, "layers": 2, "heads": 2, "shift_window": 3 if direction == "both" else 2}
    return EncoderOptions(direction=direction, **{**size, **changes})


def encoder(direction: str, variant: str = "kv-shift", seed: int = 3) -> Any:
    size = describe(with_variant(options_of(direction), variant), vocab_size=11, length=9)
    return build_model(size, seed=seed).eval().double()


def after(row: list[int | None], t: int) -> int | None:
    """Return the position of the token after t in its document, or None if there is none."""
    found = before(row[::-1], len(row) - 1 - t)
    return None if found is None else len(row) - 1 - found


def by_loop(x: torch.Tensor, coefficients: torch.Tensor, direction: str, rows: list[list[int | None]]) -> torch.Tensor:
    neighbours = {"previous": [before], "next": [after], "both": [before, after]}[direction]
    y = torch.zeros_like(x, dtype=torch.float64)
    for b, row in enumerate(rows):
        for t, document in enumerate(row):
            if document is None:
                continue
            y[b, t] = coefficients[:, :1] * x[b, t]
            for number, neighbour in enumerate(neighbours, 1):
                s = neighbour(row, t)
                if s is not None:
                    y[b, t] += coefficients[:, number : number + 1] * x[b, s]
    return y


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@every_layout
@every_direction
def test_outputs_and_gradients_by_the_loop(rows: list[list[int | None]], direction: str) -> None:
    x, coefficients = numbers(5, 7, 3, 4, seed=1), numbers(3, 3 if direction == "both" else 2, seed=2)
    inputs = [tensor.requires_grad_() for tensor in (x, coefficients)]
    outputs = shift_both_ways(x, coefficients, direction, **given(rows)), by_loop(x, coefficients, direction, rows)
    torch.testing.assert_close(*outputs, rtol=1e-14, atol=1e-14)
    gradients = (torch.autograd.grad(y, inputs, numbers(5, 7, 3, 4, seed=4)) for y in outputs)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_direction
def test_smaller_dtypes_are_rounded_once(direction: str, dtype: torch.dtype) -> None:
    x, coefficients = numbers(2, 7, 3, 4, seed=1).to(dtype), numbers(3, 3 if direction == "both" else 2, seed=2).float()
    got = shift_both_ways(x, coefficients, direction)
    assert got.dtype == dtype
    assert torch.equal(got, shift_both_ways(x.float(), coefficients, direction).to(dtype))


@every_direction
def test_one_token_and_none(direction: str) -> None:
    coefficients = numbers(3, 3 if direction == "both" else 2, seed=2)
    x = numbers(2, 1, 3, 4, seed=1)
    assert torch.equal(shift_both_ways(x, coefficients, direction), x * coefficients[:, :1])
    assert shift_both_ways(x[:, :0], coefficients, direction).shape == (2, 0, 3, 4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@every_direction
@torch.no_grad()
def test_documents_and_padded_sequences_are_each_as_alone(direction: str, attention: str) -> None:
    model = encoder(direction)
    model.set_attn_implementation(attention)
    # Transformers' eager attention computes the softmax in float32.
    close: Any = {"rtol": 1e-10, "atol": 1e-10} if attention == "sdpa" else {"rtol": 1e-6, "atol": 1e-7}
    first, second, third = ([3, 1, 4, 1], [5, 9], [2, 6, 5])
    alone = [model(torch.tensor([document])).logits[0] for document in (first, second, third)]
    numbered = torch.tensor([[0] * 4 + [1] * 2 + [2] * 3])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    packed = torch.tensor([first + second + third])
    for named in ({"seq_idx": numbered}, {"cu_seq_lens_q": torch.tensor([0, 4, 6, 9])}, {"position_ids": positions}):
        torch.testing.assert_close(model(packed, **named).logits[0], torch.cat(alone), **close)
    for content in (0, 10):
        padded = torch.tensor(
            [[content, *first, content], [content] * 3 + second + [content], [*third] + [content] * 3]
        )
        mask = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]])
        logits = model(padded, attention_mask=mask).logits
        for row, real, expected in zip(logits, mask.bool(), alone, strict=True):
            torch.testing.assert_close(row[real], expected, **close)
        assert logits.isfinite().all()


@torch.no_grad()
def test_it_sees_what_follows_and_the_shift_its_own_way() -> None:
    """A key depends only on the tokens that the shift reads; attention reads the rest of the document."""
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    for direction, reach in (("previous", {-1, 0}), ("next", {0, 1}), ("both", {-1, 0, 1})):
        shift = encoder(direction).model.layers[0].self_attn.shift
        q, k, v = (numbers(1, 7, 2, 8, seed=seed) for seed in range(3))
        changed = k.clone()
        changed[:, 3] += 1
        moved = (shift(q, k, v)[1] != shift(q, changed, v)[1]).flatten(2).any(-1)[0]
        assert {3 - int(t) for t in moved.nonzero()} == reach
    model = encoder("both", "vanilla")
    other = tokens.clone()
    other[0, -1] = 7
    assert not torch.equal(model(tokens).logits[0, 0], model(other).logits[0, 0])


def test_a_cache_is_refused() -> None:
    assert not decodes_with_cache(encoder("both"))
    with pytest.raises(ValueError, match="does not decode with a cache"):
        encoder("both").model(torch.tensor([[3]]), use_cache=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shift_window": 2}, "model.shift_window must be 3 with direction both, got 2"),
        ({"heads": 3}, r"model.width must be a multiple of 2 \* heads = 6"),
        ({"direction": "up"}, "model.direction must be one of previous, next, both, got 'up'"),
    ],
    ids=["window", "heads", "direction"],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(LabError, match=said):
        describe(options_of(**{"direction": "both", **options}), vocab_size=11, length=9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shift_window": 2}, "window must be 3 with direction both, got 2"),
        ({"shift_direction": "next"}, "window must be 2 with direction next, got 3"),
        ({"shift_direction": "up"}, "direction must be one of previous, next, both, got 'up'"),
    ],
    ids=["window", "one direction", "direction"],
)
def test_a_configuration_that_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    model = encoder("both")
    with pytest.raises(ValueError, match=said):
        type(model)(type(model.config)(**{**model.config.to_dict(), **changes}))
