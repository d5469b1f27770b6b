"""Theorem 3.3 for `kv_shift` and `KVShiftAttention`."""

import math

import pytest
import torch

from kvshift_lab.core.seeds import generator_for
from kvshift_lab.theory.checks import check_match, check_one_layer, matching_tokens
from kvshift_lab.theory.induction_head import induction_head, random_tokens
from kvshift_lab.theory.one_layer_head import build_layer, kv_shift_head


@pytest.fixture(scope="module")
def found():
    return check_one_layer(draws=48)


def test_with_the_mask_of_the_theorem_the_head_is_the_induction_head(found):
    assert found["masked"] < 1e-12


def test_with_a_causal_mask_the_difference_is_what_two_tokens_add(found):
    assert found["relation"] < 1e-12
    assert found["excess"] < 0
    assert found["causal"] > 0.29


def test_the_layer_is_the_head(found):
    assert found["layer"] < 1e-12
    assert found["windowed"] < 1e-12


def test_the_coefficients_as_printed_are_another_head(found):
    assert found["printed"] > 1


def test_as_printed_sigma_scales_the_output():
    width, sigma = 5, 0.37
    x = random_tokens(3, 13, width, generator_for("test printed", 0))
    printed = build_layer(width, sigma, as_printed=True)(x)[0][:, -1]
    plain, _ = kv_shift_head(x, math.sqrt(width), 2**-8)  # the slope of a single ALiBi head
    torch.testing.assert_close(printed, plain / sigma, rtol=0, atol=1e-14)


def test_with_a_true_match_the_masks_cease_to_matter():
    differences = [row["difference"] for row in check_match((0.1, 0.03, 0.01, 0.003))]
    assert differences == sorted(differences, reverse=True)
    assert differences[0] > 0.1
    assert differences[-1] < 1e-12


def test_with_a_true_match_the_answer_is_its_successor():
    x = matching_tokens(64, 17, 5, generator_for("test match", 0))
    assert len(x) > 10
    place = ((x[:, :-1] * x[:, -1:]).sum(2) > 1 - 1e-12).nonzero()[:, 1]
    assert len(place) == len(x)  # one match each
    successor = x[torch.arange(len(x)), place + 1]
    torch.testing.assert_close(induction_head(x, 1e-3, 1e-4), successor, rtol=0, atol=1e-12)
