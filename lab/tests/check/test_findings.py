"""The findings that a comparison keeps, and the distinction between a refusal and a crash."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvshift_lab.check.findings import Comparison, NotSupportedError, is_refusal


def raised(function, *arguments) -> Exception:
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("raised nothing")


def refuse(kind: type[Exception], message: str) -> None:
    raise kind(message)


def test_a_refusal_is_told_from_a_crash():
    refusing = "static caches are not supported"
    assert is_refusal(raised(refuse, ValueError, refusing))
    assert is_refusal(raised(refuse, NotImplementedError, "later"))
    assert is_refusal(raised(refuse, RuntimeError, "assisted decoding requires a cache"))
    assert is_refusal(raised(refuse, ValueError, "`conv` can't keep packed sequences apart without `causal_conv1d`"))
    assert not is_refusal(raised(refuse, ValueError, "`get_seq_length` can only be called on Attention layers"))
    assert not is_refusal(raised(refuse, AttributeError, refusing))
    assert not is_refusal(raised(torch.add, torch.ones(2), torch.ones(3)))
    assert not is_refusal(raised(lambda: {}["not supported"]))
    assert not is_refusal(raised(nn.functional.dropout, torch.ones(2), 3.0))  # raised by torch itself


def test_a_comparison_keeps_the_first_position_and_the_largest_error():
    found = Comparison(0.1)
    found.case = "first"
    found.add(torch.zeros(3, 2), torch.zeros(3, 2), sequence=0)
    found.case = "second"
    got = torch.tensor([[0.0, 0.05], [0.0, 0.3], [0.7, 0.0]])
    found.add(got, torch.zeros(3, 2), sequence=1, start=4)
    verdict = found.verdict("p", 1.0)
    assert (verdict.verdict, verdict.positions, verdict.wrong) == ("wrong", 6, 2)
    assert verdict.first == {"case": "second", "sequence": 1, "position": 5}
    assert verdict.error == pytest.approx(0.7)
    assert verdict.detail == (
        "from second, sequence 1, position 5 on, 2 of 6 positions: logits off by up to 0.7, beside a spread of 1"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong(value):
    found = Comparison(0.1)
    found.add(torch.tensor([[value, 0.0]]), torch.zeros(1, 2))
    assert found.verdict("p", 1.0).verdict == "wrong"


def test_tokens_that_a_model_leaves_out_are_equal():
    found = Comparison(0.1)
    found.add(torch.tensor([[-torch.inf, 0.0]]), torch.tensor([[-torch.inf, 0.0]]))
    assert found.verdict("p", 1.0).verdict == "right"


def test_what_was_found_before_an_error_counts():
    found = Comparison(0.1)
    found.add(torch.ones(1, 2), torch.zeros(1, 2))
    assert found.verdict("p", 1.0, NotSupportedError("no cache")).verdict == "wrong"
    assert Comparison(0.1).verdict("p", 1.0, NotSupportedError("no cache")).verdict == "not supported"
    assert Comparison(0.1).verdict("p", 1.0, KeyError("k")).detail == "raises KeyError: 'k'"
    with pytest.raises(AssertionError, match="compared nothing"):
        Comparison(0.1).verdict("p", 1.0)
