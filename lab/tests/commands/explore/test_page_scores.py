"""The page's `scores.js` and `contents.js` compute the same as `head_scores`, and `story.js` recognizes a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvshift_lab.run.head_scores import attention_scores, shares

from .node import run_module


@pytest.mark.parametrize(
    "coefficients",
    [
        {},
        {"alpha": [[0.2, 0.8], [-0.5, 0.25]], "beta": [[1.0, 0.0], [0.3, -0.9]]},
        {"beta": [[0.2, 0.5, 0.3], [0.0, 0.0, 0.0]]},
        {"alpha": [[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]], "beta": [[0.6, 0.3, 0.1], [0.0, 1.0, 0.0]]},
    ],
    ids=["no shift", "window 2", "values alone", "window 3"],
)
def test_scores(coefficients: dict[str, Any], tmp_path: Path):
    length, heads = 11, 4
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, heads, 2 * length + 1, 2 * length + 1, generator=generator)
    attention = (scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)).softmax(-1)
    given = {"attention": attention.flatten().tolist(), "options": {"heads": heads, "length": length, **coefficients}}
    found = run_module("scores.js", "return page.headScores(given.attention, given.options)", given, tmp_path)
    expected = attention_scores(attention, length=length, **coefficients)
    assert len(found) == heads
    for head, ours in zip(found, expected, strict=True):
        places = {"induction": "earlier+1", "previous": "previous", "duplicate": "earlier"}
        assert head == pytest.approx(
            {name: ours.moved[place] for name, place in places.items()} | {"alone": ours.alone}
        )


def test_what_a_key_is_made_of(tmp_path: Path):
    layer = {"alpha": [[0.2, -0.6], [1.0, 0.0]]}
    body = """
      const shares = [0, 1, 2, 3].map((head) => page.headShares(given, "alpha", head, 4));
      return [shares, page.madeOf(5, shares[1]), page.madeOf(0, shares[1]), page.headShares(given, "beta", 0, 4)];
    """
    found, at_5, at_0, unshifted = run_module("contents.js", body, layer, tmp_path)
    expected = shares(layer["alpha"], 4) * torch.tensor([[1, -1], [1, -1], [1, 1], [1, 1]])  # a share keeps its sign
    torch.testing.assert_close(torch.tensor(found), expected)
    assert [(part["position"], part["lag"]) for part in at_5] == [(5, 0), (4, 1)]
    assert [part["position"] for part in at_0] == [0]  # nothing precedes the first token
    assert unshifted == [1]


def test_signs_of_numbers(tmp_path: Path):
    body = "return [given.map(page.signed), given.map(page.percent)]"
    signed, percent = run_module("elements.js", body, [-0.001, 0, -0.23, 0.94], tmp_path)
    assert signed == ["0.00", "0.00", "−0.23", "0.94"]
    assert percent == ["−0.1 %", "0 %", "−23 %", "94 %"]


def test_what_is_a_copy(tmp_path: Path):
    """A copy followed any earlier occurrence of the last token, whatever its probability; None if that token is new."""
    expected = {
        ("thecatsatonthe", "c"): True,
        ("thecatsatonthe", "a"): False,
        ("abacada", "b"): True,  # the latest occurrence is followed by another
        ("abacada", "d"): True,
        ("abacada", "a"): False,
        ("aa", "a"): True,
        ("abc", "a"): None,
        ("c", "c"): None,
    }
    body = "return given.map(([text, answer]) => page.isCopy([...text].map((id) => ({ id })), answer))"
    assert run_module("story.js", body, list(expected), tmp_path) == list(expected.values())
