"""Tests marked `no_models`, which `make test-oldest` leaves out, cannot create a model, tokenizer or trainer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer


def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(vocab_size=7, hidden_size=4, num_hidden_layers=1, num_attention_heads=1))


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))


@pytest.mark.no_models
@pytest.mark.parametrize("make", [model, tokenizer, Trainer])
def test_what_is_of_transformers_is_refused(make):
    with pytest.raises(AssertionError, match=r"is made by a test marked no_models"):
        make()


def test_other_tests_make_what_they_need():
    assert model().config.vocab_size == 7
    assert tokenizer().vocab_size == 1
