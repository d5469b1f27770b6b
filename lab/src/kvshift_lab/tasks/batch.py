"""The batch and the interface that all tasks share, and accuracy by slice.

Labels are where transformers expects them: labels[t] is the target of the prediction from input_ids[:t], so the output
at t - 1 is compared with labels[t]. For any causal language model in transformers,
`model(input_ids=..., labels=...).loss` is therefore the loss of the task. Column 0 has no preceding token, and its
label is always -100. A task that scores the output at its last token has one more column, only for the label.

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

IGNORED = -100  # the default ignore_index of cross_entropy, with which transformers also pads labels


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of sequences, on the CPU. Every field is (B, T) int64.

    Attributes:
        input_ids: tokens.
        labels: target of the output at the previous column; -100 for none.
        slices: index into the task's `slice_names` of the metric in which a label counts; -1 for none. Every position
            with an index has a label.
    """

    input_ids: Tensor
    labels: Tensor
    slices: Tensor


class Task(Protocol):
    """A distribution of sequences, from which batches are drawn."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V; ids are 0 ... vocab_size - 1."""
        ...

    @property
    def length(self) -> int:
        """Sequence length T, the number of columns of `input_ids`."""
        ...

    @property
    def slice_names(self) -> tuple[str, ...]:
        """Names of the S groups of labels for which accuracy is reported."""
        ...

    @property
    def chance(self) -> Mapping[str, float]:
        """Chance level by slice: the expected accuracy of the guesser that the task's docstring describes. Slices
        without such a level are omitted."""
        ...

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        """Draw the next `batch_size` sequences. The same state of the (CPU) generator gives identical sequences."""
        ...


def concatenate(
    batches: Sequence[Batch], fields: Sequence[str] = ("input_ids", "labels", "slices")
) -> dict[str, Tensor]:
    """Concatenate batches into one dict of the named fields: a `data_collator` for datasets of whole batches."""
    return {name: torch.cat([getattr(batch, name) for batch in batches]) for name in fields}


def count_correct(predicted: Tensor, labels: Tensor, slices: Tensor, slice_count: int) -> tuple[Tensor, Tensor]:
    """Count the correct and all answers of each slice. Their ratio is the accuracy, also after sums over batches.

        right[s] = #{(b, t) : slices[b, t] = s and predicted[b, t - 1] = labels[b, t]}

    Args:
        predicted: (B, T), argmax of the logits at each input.
        labels, slices: (B, T), fields of the batch.
        slice_count: S, the length of `slice_names`.

    Returns:
        Two (S,) int64 tensors: the correct answers and all answers.
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
