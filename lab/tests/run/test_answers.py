"""Questions to a model: prompts of unequal length, the end of an answer, and shares with their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.run.answers import answer_accuracy, generate_answers
from kvshift_lab.tasks.questions import Question
from tests.models.llama.tiny import tiny_model

END = 12


class Echoes:
    """A task with prompts of 1 to 5 tokens. The truth is their length, and answers are judged by theirs."""

    vocab_size, length, slice_names, chance = 13, 7, ("all",), {}
    end_token, max_new_tokens, temperature = END, 6, 0.0

    def batch(self, generator: torch.Generator, batch_size: int) -> Any:
        raise NotImplementedError

    def questions(self, generator: torch.Generator, count: int) -> list[Question]:
        lengths = [1 + number % 5 for number in range(count)]
        return [Question(torch.randint(END, (length,), generator=generator), length) for length in lengths]

    def judge(self, question: Question, answer: Tensor) -> Mapping[str, bool]:
        found = {"short": len(answer) < 6}
        return found | ({"odd": True} if question.truth % 2 else {})


@pytest.fixture(scope="module")
def model() -> KVShiftLlamaForCausalLM:
    return tiny_model(vocab_size=13, seed=3)  # its answers differ, and some end


def alone(model: KVShiftLlamaForCausalLM, prompt: Tensor, tokens: int) -> Tensor:
    """Return the likeliest tokens, one after the other, without a cache."""
    row = prompt
    for _ in range(tokens):
        following = model(input_ids=row[None], use_cache=False).logits[0, -1].argmax()
        if following == END:
            break
        row = torch.cat([row, following[None]])
    return row[len(prompt) :]


def test_answers_are_those_of_each_prompt_alone(model: KVShiftLlamaForCausalLM) -> None:
    task = Echoes()
    questions = task.questions(torch.Generator().manual_seed(5), 23)
    found = generate_answers(model, task, questions, seed=0)
    expected = [alone(model, question.prompt, 6) for question in questions]
    for got, wanted in zip(found, expected, strict=True):
        assert got.tolist() == wanted.tolist()
    assert any(len(tokens) < 6 for tokens in expected)
    assert any(len(tokens) == 6 for tokens in expected)


def test_drawn_answers_follow_the_seed_and_leave_torchs_generator(model: KVShiftLlamaForCausalLM) -> None:
    task = Echoes()
    task.temperature = 1.0
    questions = task.questions(torch.Generator().manual_seed(5), 7)
    state = torch.get_rng_state()
    first, again, other = (generate_answers(model, task, questions, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert [row.tolist() for row in first] == [row.tolist() for row in again]
    assert [row.tolist() for row in first] != [row.tolist() for row in other]


def test_drawn_tokens_have_the_models_probabilities(model: KVShiftLlamaForCausalLM) -> None:
    """Neither top-k nor top-p removes unlikely tokens: transformers' default keeps 50, the lab's keeps all."""
    task = Echoes()
    task.temperature, task.max_new_tokens = 1.0, 1
    prompt = torch.tensor([3, 1])
    drawn = generate_answers(model, task, [Question(prompt)] * 4000, seed=0)
    counts = torch.bincount(torch.tensor([int(row[0]) if len(row) else END for row in drawn]), minlength=13)
    share = model(input_ids=prompt[None]).logits[0, -1].softmax(-1)
    deviation = (counts - 4000 * share) / (4000 * share * (1 - share)).sqrt().clamp(min=1)
    assert deviation.abs().max() < 5
    assert (counts > 0).sum() > 5


def test_shares_are_over_the_questions_that_count(model: KVShiftLlamaForCausalLM) -> None:
    task = Echoes()
    found = answer_accuracy(model, task, 13, seed=0, batch_size=4)
    assert found["odd"] == {"share": 1.0, "stderr": 0.0, "questions": 8}
    short = found["short"]
    assert short["questions"] == 13
    assert 0 < short["share"] < 1
    assert short["stderr"] == pytest.approx((short["share"] * (1 - short["share"]) / 13) ** 0.5)


def test_batches_do_not_change_the_answers(model: KVShiftLlamaForCausalLM) -> None:
    assert answer_accuracy(model, Echoes(), 13, seed=0, batch_size=1) == answer_accuracy(
        model, Echoes(), 13, seed=0, batch_size=13
    )
