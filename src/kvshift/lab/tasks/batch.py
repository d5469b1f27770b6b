"""What all tasks share: the batch, the interface of a task, and accuracy by slice.

Labels stand where Hugging Face wants them: labels[t] is what the model is to say after it has read input_ids[:t], so
the output at t - 1 is compared with labels[t]. `model(input_ids=..., labels=...).loss` of any causal language model
in transformers is therefore the loss of the task. Column 0 follows nothing and is always -100; a task that scores the
output at its last token ends in a column that only holds the label.

    input_ids    7  4  9  7  4      the output at column 3, after 7 4 9 7, is compared with labels[4] = 4
    labels       -  -  -  -  4      - is -100: not trained on
    slices       .  .  .  .  0      . is -1: counts in no metric; 0 is slice_names[0]

Shapes: B batch, T positions in a sequence, S slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

IGNORED = -100  # what cross_entropy leaves out by default, and what transformers pads labels with


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of a task, on the CPU. Every field is (B, T) int64.

    Attributes:
        input_ids: tokens.
        labels: the token that the output at the column before is trained on; -100 for none.
        slices: index into the task's `slice_names` of the metric that a label counts in; -1 for none. Where it is
            not -1 there is a label.
    """

    input_ids: Tensor
    labels: Tensor
    slices: Tensor


class Task(Protocol):
    """A law of sequences, from which batches are drawn."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 ... vocab_size - 1."""
        ...

    @property
    def length(self) -> int:
        """T, columns of `input_ids`."""
        ...

    @property
    def slice_names(self) -> tuple[str, ...]:
        """Names of the S groups of labels that accuracy is reported of."""
        ...

    @property
    def chance(self) -> Mapping[str, float]:
        """Expected accuracy, for slices that have one, of the guesser that the task's docstring names."""
        ...

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        """The next `batch_size` sequences of a generator (on the CPU): the same generator state gives the same bits."""
        ...


def concatenate(
    batches: Sequence[Batch], fields: Sequence[str] = ("input_ids", "labels", "slices")
) -> dict[str, Tensor]:
    """Batches to one dict of the named fields: a `data_collator` where an item is a whole batch."""
    return {name: torch.cat([getattr(batch, name) for batch in batches]) for name in fields}


def count_correct(predicted: Tensor, labels: Tensor, slices: Tensor, slice_count: int) -> tuple[Tensor, Tensor]:
    """Right answers and all answers of each slice; accuracy is one over the other, also when summed over batches.

        right[s] = #{(b, t) : slices[b, t] = s and predicted[b, t - 1] = labels[b, t]}

    Args:
        predicted: (B, T), argmax of the logits at each input.
        labels, slices: (B, T), of the batch.
        slice_count: S, the length of `slice_names`.

    Returns:
        Two (S,) int64.
    """
    if not predicted.shape == labels.shape == slices.shape:
        raise ValueError(
            f"predicted, labels and slices must have one shape (B, T), got {tuple(predicted.shape)}, "
            f"{tuple(labels.shape)} and {tuple(slices.shape)}"
        )
    scored = slices[:, 1:] >= 0
    right = (predicted[:, :-1] == labels[:, 1:])[scored]
    index = slices[:, 1:][scored]
    return torch.bincount(index[right], minlength=slice_count), torch.bincount(index, minlength=slice_count)
