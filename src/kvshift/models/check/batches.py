"""Forward passes without a cache: the same bits twice, batches and padding.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvshift.models.check.findings import Comparison, NotSupportedError
from kvshift.models.check.subject import Subject

__all__ = ["batch", "left_padding", "left_padding_mask_alone", "padded", "right_padding", "same_bits", "unequal"]


def same_bits(subject: Subject, found: Comparison) -> None:
    """The same call gives the same bits, whatever was called in between."""
    found.tolerance = 0.0
    ids = subject.tokens(2, subject.length)
    first = subject.forward(ids)
    for case, between in (("at once", None), ("after another batch", subject.tokens(3, subject.length // 2))):
        found.case = case
        if between is not None:
            subject.forward(between)
        for number, (got, expected) in enumerate(zip(subject.forward(ids), first, strict=True)):
            found.add(got, expected, sequence=number)


def batch(subject: Subject, found: Comparison) -> None:
    """Each sequence of a batch gets what it gets alone."""
    ids = subject.tokens(3, subject.length)
    for number, (got, tokens) in enumerate(zip(subject.forward(ids), ids, strict=True)):
        found.add(got, subject.alone(tokens), sequence=number)


def unequal(subject: Subject) -> list[Tensor]:
    """Sequences of unequal lengths, one of a single token among them."""
    return [subject.tokens(n) for n in (3, subject.length, 1, subject.length // 2)]


def padded(subject: Subject, sequences: list[Tensor], *, left: bool, width: int = 0) -> tuple[Tensor, Tensor]:
    """A batch (B, T) padded with random tokens, and its mask."""
    width = max(width, *(len(tokens) for tokens in sequences))
    ids, mask = subject.tokens(len(sequences), width), torch.zeros(len(sequences), width, dtype=torch.long)
    for number, tokens in enumerate(sequences):
        place = slice(width - len(tokens), None) if left else slice(0, len(tokens))
        ids[number, place], mask[number, place] = tokens, 1
    return ids, mask


def left_padding(subject: Subject, found: Comparison) -> None:
    """Each sequence of a left-padded batch gets what it gets alone, with position_ids that begin behind the padding."""
    _padding(subject, found, left=True, positions=True)


def left_padding_mask_alone(subject: Subject, found: Comparison) -> None:
    """The same where the mask alone tells the padding, for a model to which only distances matter."""
    if subject.takes("position_ids") and not subject.agrees_from(subject.first_position + 5):
        raise NotSupportedError("positions are absolute: a left-padded batch needs position_ids")
    _padding(subject, found, left=True, positions=False)


def right_padding(subject: Subject, found: Comparison) -> None:
    """Each sequence of a right-padded batch gets what it gets alone."""
    _padding(subject, found, left=False, positions=False)


def _padding(subject: Subject, found: Comparison, *, left: bool, positions: bool) -> None:
    several = unequal(subject)
    for case, sequences in (("batch of 4", several), ("batch of 1", several[-1:])):
        found.case = case
        ids, mask = padded(subject, sequences, left=left, width=subject.length)
        logits = subject.forward(ids, attention_mask=mask, **(subject.positions(mask) if positions else {}))
        for number, (got, real, tokens) in enumerate(zip(logits, mask.bool(), sequences, strict=True)):
            found.add(got[real], subject.alone(tokens), sequence=number)
