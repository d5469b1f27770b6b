"""Documents packed into one sequence: each must get what it gets alone, and no gradient may cross their boundaries.

Shapes: P positions of the pack, S documents, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvshift.models.check.findings import Comparison, NotSupportedError
from kvshift.models.check.gradients import token_gradients
from kvshift.models.check.subject import Subject

__all__ = ["document_gradients", "documents_by"]


class Pack:
    """Documents of unequal lengths, one of a single token among them, and every way to say where each begins."""

    def __init__(self, subject: Subject) -> None:
        length = subject.length
        lengths = [max(length // 5, 2), 1, max(length // 3, 2), 2]
        lengths.append(max(length - sum(lengths), 2))
        self.documents = [subject.tokens(n) for n in lengths]
        self.ids = torch.cat(self.documents).unsqueeze(0)
        numbers = [torch.full((n,), number) for number, n in enumerate(lengths)]
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        self.starts = offsets[:-1].tolist()
        self.names: dict[str, Any] = {
            "position_ids": torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0),
            "seq_idx": torch.cat(numbers).unsqueeze(0).to(torch.int32),
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


def documents_by(*names: str, cache: bool = False, mask: bool = False) -> Callable[[Subject, Comparison], None]:
    """The property that documents named by these arguments do not see each other, beside a cache or a mask of ones.

    Beside a cache, the last document continues afterwards.
    """

    def documents(subject: Subject, found: Comparison) -> None:
        pack = Pack(subject)
        beside = {"attention_mask": torch.ones_like(pack.ids)} if mask else {}

        def feed(**named: Any) -> tuple[Tensor, Any]:
            return subject.resume(pack.ids, **named) if cache else (subject.forward(pack.ids, **named), None)

        try:
            logits, state = feed(**beside, **{name: pack.names[name] for name in names})
        except (TypeError, ValueError) as error:
            raise _not_taken(error, names) or error from error
        for number, (start, document) in enumerate(zip(pack.starts, pack.documents, strict=True)):
            found.case = f"document {number}"
            found.add(logits[0, start : start + len(document)], subject.alone(document), start=start)
        if found.first is None:
            if state is not None:
                _continue(subject, found, pack, state)
        elif not any(subject.takes(name) for name in names) and torch.equal(feed(**beside)[0], logits):
            found.first = None
            raise NotSupportedError(f"{names[0]} has no effect")

    return documents


def _continue(subject: Subject, found: Comparison, pack: Pack, cache: Any) -> None:
    last = pack.documents[-1]
    for step in range(2):
        found.case = f"token {step + 1} after the pack"
        last = torch.cat([last, subject.tokens(1)])
        position = torch.tensor([[len(last) - 1]])
        logits, cache = subject.resume(last[-1:].unsqueeze(0), cache, position_ids=position)
        found.add(logits[0], subject.alone(last)[-1:], start=pack.ids.shape[1] + step)


def document_gradients(subject: Subject, found: Comparison) -> None:
    """No gradient reaches a document from another, as position_ids name them."""
    pack = Pack(subject)
    try:
        gradients = token_gradients(subject, pack.ids, _spans(pack), position_ids=pack.names["position_ids"])
    except (TypeError, ValueError) as error:
        raise _not_taken(error, ("position_ids",)) or error from error
    largest = max(float(gradient.max()) for gradient in gradients)
    for number, (start, document, gradient) in enumerate(zip(pack.starts, pack.documents, gradients, strict=True)):
        found.case = f"document {number}"
        outside = gradient / largest
        outside[start : start + len(document)] = 0
        found.errors(outside)
    if found.first is not None and not subject.takes("position_ids"):
        found.first = None
        raise NotSupportedError("forward has no argument position_ids")


def _spans(pack: Pack) -> list[Tensor]:
    """The positions of each document."""
    return [torch.arange(start, start + len(d)) for start, d in zip(pack.starts, pack.documents, strict=True)]


def _not_taken(error: Exception, names: Sequence[str]) -> NotSupportedError | None:
    """The error of a call that passes an argument that is not there."""
    message = str(error)
    missing = "unexpected keyword argument" in message or "not used by the model" in message
    given = [name for name in names if f"'{name}'" in message]
    return NotSupportedError(f"forward has no argument {given[0]}") if missing and given else None
