"""Documents packed into rows: each must get what it gets alone, and no gradient may cross their boundaries.

Shapes: B rows, P positions of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvshift.models.check.findings import Comparison, NotSupportedError
from kvshift.models.check.gradients import token_gradients
from kvshift.models.check.subject import Subject

__all__ = ["document_gradients", "documents_by", "documents_in_chunks", "one_row", "padded_rows", "several_rows"]


class Pack:
    """Documents in rows, padded with random tokens to the longest of them, and every way to say where each begins.

    Args:
        rows: the documents of each row.
        case: begins what `Comparison.case` is to say.
        padding: on the "left", the "right", or, "inner", also after each document.
    """

    def __init__(
        self, subject: Subject, rows: Sequence[Sequence[Tensor]], case: str = "", padding: str = "right"
    ) -> None:
        self.rows, self.case = rows, case
        gap = int(padding == "inner")
        lengths = [sum(len(document) + gap for document in row) for row in rows]
        self.ids = subject.tokens(len(rows), max(lengths))
        self.mask, positions, seq_idx = (torch.zeros_like(self.ids) for _ in range(3))
        self.starts: list[list[int]] = []
        for number, row in enumerate(rows):
            start = self.ids.shape[1] - lengths[number] if padding == "left" else 0
            self.starts.append([])
            for index, document in enumerate(row):
                self.starts[-1].append(start)
                place = number, slice(start, start + len(document))
                self.ids[place], self.mask[place], seq_idx[place] = document, 1, index + 1
                positions[place] = torch.arange(len(document)) + subject.first_position
                start += len(document) + gap
        self.names: dict[str, Any] = {"position_ids": positions, "seq_idx": seq_idx.to(torch.int32)}
        if len(rows) == 1 and bool(self.mask.all()):
            offsets = torch.tensor([*self.starts[0], self.ids.shape[1]], dtype=torch.int32)
            longest = max(map(len, rows[0]))
            self.names |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
            self.names |= {"max_length_q": longest, "max_length_k": longest}

    def documents(self) -> Iterator[tuple[int, int, int, Tensor]]:
        """Row, number in it, first position, and tokens of each document."""
        for number, (starts, row) in enumerate(zip(self.starts, self.rows, strict=True)):
            for index, (start, document) in enumerate(zip(starts, row, strict=True)):
                yield number, index, start, document


def _documents(subject: Subject) -> list[Tensor]:
    """Five of unequal lengths, one of a single token among them."""
    length = subject.length
    lengths = [max(length // 5, 2), 1, max(length // 3, 2), 2]
    return [subject.tokens(n) for n in (*lengths, max(length - sum(lengths), 2))]


def one_row(subject: Subject) -> list[Pack]:
    """Five documents in one row."""
    return [Pack(subject, [_documents(subject)])]


def several_rows(*orders: Sequence[int]) -> Callable[[Subject], list[Pack]]:
    """A pack for each order of three rows of the same length: two with boundaries of their own, and one without any."""

    def packs(subject: Subject) -> list[Pack]:
        documents = _documents(subject)
        rows = [documents, [*documents[3:], *documents[:3]], [torch.cat(documents)]]
        return [Pack(subject, [rows[number] for number in order], f"{len(order)} rows") for order in orders]

    return packs


def padded_rows(*sides: str) -> Callable[[Subject], list[Pack]]:
    """A pack for each of these sides of the padding: rows of 1, 3, 5 and 3 documents."""

    def packs(subject: Subject) -> list[Pack]:
        documents = _documents(subject)
        rows = [documents[-1:], documents[:3], documents, documents[1:4]]
        return [Pack(subject, rows, f"{side} padding", side) for side in sides]

    return packs


def documents_by(
    *names: str, packs: Callable[[Subject], list[Pack]] = one_row, cache: bool = False, mask: bool = False
) -> Callable[[Subject, Comparison], None]:
    """The property that documents named by these arguments do not see each other, beside a cache or a mask.

    Beside a cache, the last document of each row continues afterwards: no row may end in padding.
    """

    def documents(subject: Subject, found: Comparison) -> None:
        with _named_by(subject, found, names):
            for pack in packs(subject):
                named = {name: pack.names[name] for name in names} | ({"attention_mask": pack.mask} if mask else {})
                if cache:
                    logits, state = subject.resume(pack.ids, **named)
                else:
                    logits, state = subject.forward(pack.ids, **named), None
                _compare(subject, found, pack, logits)
                if state is not None and found.first is None:
                    _continue(subject, found, pack, state, mask)

    return documents


@contextmanager
def _named_by(subject: Subject, found: Comparison, names: Sequence[str]) -> Iterator[None]:
    """Documents that are named by arguments which `forward` does not take, or passes over, are not supported."""
    try:
        yield
    except (TypeError, ValueError) as error:
        missing = _not_taken(error, names)
        if missing is None:
            raise
        raise missing from error
    if found.first is not None and not _has_effect(subject, names):
        found.first = None
        raise NotSupportedError(f"{names[0]} has no effect")


def _has_effect(subject: Subject, names: Sequence[str]) -> bool:
    """Whether `forward` takes one of these, or they change a bit of the logits of one row."""
    if any(subject.takes(name) for name in names):
        return True
    subject.restart()
    (pack,) = one_row(subject)
    named = {name: pack.names[name] for name in names}
    return not torch.equal(subject.forward(pack.ids, **named), subject.forward(pack.ids))


def _compare(subject: Subject, found: Comparison, pack: Pack, logits: Tensor) -> None:
    for row, index, start, document in pack.documents():
        found.case = f"{pack.case}, document {index}".removeprefix(", ")
        found.add(logits[row, start : start + len(document)], subject.alone(document), sequence=row, start=start)


def _continue(subject: Subject, found: Comparison, pack: Pack, cache: Any, masked: bool) -> None:
    """Two tokens after each row, which continue its last document."""
    subject.restart()  # the same tokens after every pack
    new, mask = subject.tokens(2), pack.mask
    for step in range(2):
        found.case = f"{pack.case}, token {step + 1} after the pack".removeprefix(", ")
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        positions = torch.tensor([[len(row[-1]) + step + subject.first_position] for row in pack.rows])
        beside = {"attention_mask": mask} if masked else {}
        logits, cache = subject.resume(new[step].expand_as(positions), cache, position_ids=positions, **beside)
        for number, (row, got) in enumerate(zip(pack.rows, logits, strict=True)):
            truth = subject.alone(torch.cat([row[-1], new]))[len(row[-1]) + step :]
            found.add(got, truth[:1], sequence=number, start=pack.ids.shape[1] + step)


def documents_in_chunks(subject: Subject, found: Comparison) -> None:
    """A pack in three calls, each of which begins within a document, as position_ids name them."""
    (pack,) = one_row(subject)
    starts, length = pack.starts[0], pack.ids.shape[1]
    cache, parts, begin = None, [], 0
    with _named_by(subject, found, ("position_ids",)):
        for end in (starts[1] - 1, (starts[2] + starts[3]) // 2, length):
            part = slice(begin, end)
            logits, cache = subject.resume(pack.ids[:, part], cache, position_ids=pack.names["position_ids"][:, part])
            parts.append(logits)
            begin = end
        _compare(subject, found, pack, torch.cat(parts, dim=1))


def document_gradients(subject: Subject, found: Comparison) -> None:
    """No gradient reaches a document from another, as position_ids name them."""
    (pack,) = one_row(subject)
    spans = [torch.arange(start, start + len(document)) for _, _, start, document in pack.documents()]
    with _named_by(subject, found, ("position_ids",)):
        gradients = token_gradients(subject, pack.ids, spans, position_ids=pack.names["position_ids"])
        largest = max(float(gradient.max()) for gradient in gradients)
        for number, (span, gradient) in enumerate(zip(spans, gradients, strict=True)):
            found.case = f"document {number}"
            outside = gradient / largest
            outside[span] = 0
            found.errors(outside)


def _not_taken(error: Exception, names: Sequence[str]) -> NotSupportedError | None:
    """The error of a call that passes an argument that is not there."""
    message = str(error)
    missing = "unexpected keyword argument" in message or "not used by the model" in message
    given = [name for name in names if f"'{name}'" in message]
    return NotSupportedError(f"forward has no argument {given[0]}") if missing and given else None
