"""Batches of sequences, alone or packed, and the calls that feed them to a model.

Shapes: B rows, T columns, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvshift_lab.check.subject import Subject

Rows = Iterable[Tensor | Sequence[Tensor]]
ALL = {"": slice(None)}


class BatchSequence(NamedTuple):
    """A sequence in a batch: its row, its columns in increasing order, its tokens, and its name in a pack."""

    row: int
    columns: list[int]
    tokens: Tensor
    label: str


class Batch:
    """Sequences in rows, padded with random tokens, and the arguments of `forward` that describe their places.

    Args:
        rows: for each row, a sequence or the documents of a pack; if one row is a pack, all rows are treated as packs.
        case: name of the batch in verdicts.
        padding: "left", "right", or "inner", after each document.
        width: T, if it is to be more than the longest row needs.

    Attributes:
        cache, column: the cache of the calls so far, and the column where the next call begins.
    """

    def __init__(self, subject: Subject, rows: Rows, case: str = "", padding: str = "right", width: int = 0) -> None:
        packs = [[row] if isinstance(row, Tensor) else row for row in rows]
        gap = int(padding == "inner")
        lengths = [sum(len(tokens) + gap for tokens in pack) for pack in packs]
        self.subject, self.case, self.width = subject, case, max(width, *lengths)
        self.packed = any(len(pack) > 1 for pack in packs)
        self.ids = subject.tokens(len(packs), self.width)
        self.attention_mask, self.seq_idx = torch.zeros_like(self.ids), torch.zeros_like(self.ids, dtype=torch.int32)
        self.cache, self.column, self.sequences = None, 0, list[BatchSequence]()
        for row, pack in enumerate(packs):
            start = self.width - lengths[row] if padding == "left" else 0
            for index, tokens in enumerate(pack):
                columns = list(range(start, start + len(tokens)))
                self.ids[row, columns], self.attention_mask[row, columns] = tokens, 1
                self.seq_idx[row, columns] = index + 1
                self.sequences.append(BatchSequence(row, columns, tokens, f"document {index}" if self.packed else ""))
                start += len(tokens) + gap

    @property
    def position_ids(self) -> Tensor:
        """Positions (B, T), which restart with each document of a pack."""
        first = self.subject.first_position
        if not self.packed:
            return (self.attention_mask.cumsum(1) - 1).clamp(min=0) + first
        positions = torch.zeros_like(self.ids)
        for sequence in self.sequences:
            positions[sequence.row, sequence.columns] = torch.arange(len(sequence.tokens)) + first
        return positions

    @property
    def cu_seq_lens_q(self) -> Tensor:
        """Start of each document in a single row, and the end of the row: (documents + 1,)."""
        return torch.tensor([*(sequence.columns[0] for sequence in self.sequences), self.width], dtype=torch.int32)

    @property
    def max_length_q(self) -> int:
        return max(len(sequence.tokens) for sequence in self.sequences)

    cu_seq_lens_k, max_length_k = cu_seq_lens_q, max_length_q

    def arguments(self, names: Iterable[str], part: slice = slice(None)) -> dict[str, Any]:
        """Return arguments of `forward` by name for a part of the columns; the mask also covers the columns before.

        The position_ids of a pack mark its documents; those of other batches are only passed to models that take them.
        """
        accepts = self.subject.accepts
        values = {name: getattr(self, name) for name in names if self.packed or name != "position_ids" or accepts(name)}
        for name, columns in (("attention_mask", slice(part.stop)), ("position_ids", part)):
            if name in values:
                values[name] = values[name][:, columns]
        return values

    def forward(self, names: Iterable[str] = (), **options: Any) -> Tensor:
        """Return the logits (B, T, V) of one call without a cache, with the arguments of these names."""
        return self.subject.forward(self.ids, **self.arguments(names), **options)

    def feed(self, size: int, names: Iterable[str], **options: Any) -> Tensor:
        """Feed the next columns with the cache of the previous call, and return their logits (B, size, V)."""
        part = slice(self.column, self.column + size)
        arguments = self.arguments(names, part)
        logits, self.cache = self.subject.resume(self.ids[:, part], self.cache, **arguments, **options)
        self.column = part.stop
        return logits

    def extend(self, new: Tensor) -> None:
        """Append `new` (B, N) to the last sequence of each row, after any padding; drop the earlier sequences."""
        columns = list(range(self.width, self.width + new.shape[1]))
        last = {sequence.row: sequence for sequence in self.sequences}.values()
        self.sequences = [
            BatchSequence(i, [*at, *columns], torch.cat([tokens, new[i]]), "") for i, at, tokens, _ in last
        ]
        self.ids = torch.cat([self.ids, new], dim=1)
        self.attention_mask = torch.cat([self.attention_mask, torch.ones_like(new)], dim=1)
        self.width = self.ids.shape[1]

    def compare(self, logits: Tensor, *, start: int = 0, reference: Tensor | None = None) -> None:
        """Compare the logits of the columns from `start` on with those of each sequence alone, or with a reference.

        Verdicts count positions from the beginning of the sequence; in a pack, from the beginning of the row.

        Args:
            logits, reference: (B, columns, V); values at padding are ignored.
        """
        for sequence in self.sequences:
            first, end = (bisect_left(sequence.columns, column) for column in (start, start + logits.shape[1]))
            if first == end:
                continue
            where = sequence.row, torch.tensor(sequence.columns[first:end]) - start
            expected = (
                self.subject.reference_logits(sequence.tokens)[first:end] if reference is None else reference[where]
            )
            position = sequence.columns[first] if self.packed else first
            label = sequence.label if reference is None else ""
            self.subject.result.add(logits[where], expected, sequence=sequence.row, start=position, within=label)

    def compare_calls(self, sizes: Iterable[int], names: Iterable[str] = ()) -> None:
        """Feed these numbers of columns in successive calls with a cache; compare each with the sequences alone."""
        for size in sizes:
            start = self.column
            self.compare(self.feed(size, names), start=start)


def unpadded(subject: Subject, shapes: dict[str, tuple[int, int]]) -> Iterator[Batch]:
    """Return a batch for each case, of the given shape (B, T)."""
    several = [subject.tokens(*shape) for shape in shapes.values()]
    return (Batch(subject, tokens, case) for case, tokens in zip(shapes, several, strict=True))


def draw_sequences(subject: Subject) -> list[Tensor]:
    """Draw four sequences of unequal lengths, one of them a single token."""
    return [subject.tokens(n) for n in (3, subject.length, 1, subject.length // 2)]


def padded(subject: Subject, side: str, cases: Mapping[str, slice] = ALL, width: int = 0) -> Iterator[Batch]:
    """Yield for each case a batch of the sequences from `draw_sequences` that it selects."""
    sequences = draw_sequences(subject)
    for case, some in cases.items():
        yield Batch(subject, sequences[some], case, side, width)


def draw_documents(subject: Subject) -> list[Tensor]:
    """Draw five documents of unequal lengths, one of them a single token."""
    length = subject.length
    lengths = [max(length // 5, 2), 1, max(length // 3, 2), 2]
    return [subject.tokens(n) for n in (*lengths, max(length - sum(lengths), 2))]


def one_pack(subject: Subject) -> Iterator[Batch]:
    """Yield one batch, of five documents in one row."""
    yield Batch(subject, [draw_documents(subject)])


def several_packs(subject: Subject, *orders: Sequence[int]) -> Iterator[Batch]:
    """Yield a batch for each order of three rows of the same length: two with different boundaries, one without any."""
    five = draw_documents(subject)
    rows = [five, [*five[3:], *five[:3]], [torch.cat(five)]]
    for order in orders:
        yield Batch(subject, [rows[number] for number in order], f"{len(order)} rows")


def padded_packs(subject: Subject, *sides: str) -> Iterator[Batch]:
    """Yield for each side of the padding a batch with rows of 1, 3, 5 and 3 documents."""
    five = draw_documents(subject)
    for side in sides:
        yield Batch(subject, [five[-1:], five[:3], five, five[1:4]], f"{side} padding", side)
