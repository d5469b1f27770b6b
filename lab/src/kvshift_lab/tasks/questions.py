"""Tasks that are evaluated on generated text: questions, and a judge of the answers.

The accuracy of single tokens cannot show whether a solution is right or a sentence belongs to a grammar. Such a task is
trained on sequences like any other task; its questions are used at the end of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvshift_lab.tasks.batch import Task


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt and the information needed to judge its answer.

    Attributes:
        prompt: (P,) int64, P >= 1, the tokens that the model continues.
        truth: reference for `judge`, which the model does not see.
    """

    prompt: Tensor
    truth: Any = None


@runtime_checkable
class QuestionTask(Task, Protocol):
    """A task that is also evaluated on generated text."""

    @property
    def end_token(self) -> int:
        """The token that ends an answer."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens in an answer. A longer one is cut off and judged as it is."""
        ...

    @property
    def temperature(self) -> float:
        """Sampling temperature of the answers: logits are divided by it; 0 means greedy decoding."""
        ...

    def questions(self, generator: torch.Generator, count: int) -> list[Question]:
        """Draw the next `count` questions, none of which can occur in training."""
        ...

    def judge(self, question: Question, answer: Tensor) -> Mapping[str, bool]:
        """Return whether an answer is right, by the name of each measure in which the question counts.

        Args:
            question: a question of this task.
            answer: (N,) int64, the tokens after the prompt, up to but excluding `end_token`.
        """
        ...
