"""Tasks whose answer is a whole text: what is asked, and who judges what a model writes.

Accuracy of single tokens cannot say whether a solution is right or a sentence belongs to a grammar. Such a task is
trained on sequences like any other, and asked questions at the end of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvshift.lab.tasks.batch import Task


@dataclass(frozen=True, eq=False)
class Question:
    """One prompt, and what its judge must know.

    Attributes:
        prompt: (P,) int64, P >= 1, what the model continues.
        truth: what `judge` compares with; the model does not see it.
    """

    prompt: Tensor
    truth: Any = None


@runtime_checkable
class QuestionTask(Task, Protocol):
    """A task that also asks for whole texts."""

    @property
    def end_token(self) -> int:
        """The model has answered once it writes this."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """An answer without `end_token` is cut off here, and judged as it stands."""
        ...

    @property
    def temperature(self) -> float:
        """Of the answers: logits are divided by it; 0: always the likeliest token."""
        ...

    def questions(self, generator: torch.Generator, count: int) -> list[Question]:
        """The next `count` questions of a generator, none of which can occur in training."""
        ...

    def judge(self, question: Question, answer: Tensor) -> Mapping[str, bool]:
        """Whether what the model wrote is right, by the name of each measure that the question counts in.

        Args:
            question: of this task.
            answer: (N,) int64, the tokens after the prompt, without `end_token` and what follows it.
        """
        ...
