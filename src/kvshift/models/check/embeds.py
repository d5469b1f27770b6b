"""inputs_embeds: a call that gets the embeddings of tokens must give what it gives for the tokens themselves.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvshift.models.check.batches import padded, unequal
from kvshift.models.check.findings import Comparison
from kvshift.models.check.packs import one_row
from kvshift.models.check.subject import Subject

__all__ = ["embedded", "embedded_documents", "embedded_padding", "embedded_with_cache"]


def embedded(subject: Subject, found: Comparison) -> None:
    """A batch, and a single token."""
    for case, ids in (("batch of 3", subject.tokens(3, subject.length)), ("one token", subject.tokens(1, 1))):
        _compare(subject, found, case, ids)


def embedded_padding(subject: Subject, found: Comparison) -> None:
    """Batches padded on either side, which the mask alone tells."""
    for side in ("left", "right"):
        ids, mask = padded(subject, unequal(subject), left=side == "left")
        _compare(subject, found, f"{side} padding", ids, attention_mask=mask)


def embedded_documents(subject: Subject, found: Comparison) -> None:
    """A pack, with the same position_ids."""
    subject.require("position_ids")
    (pack,) = one_row(subject)
    _compare(subject, found, "", pack.ids, position_ids=pack.names["position_ids"])


def embedded_with_cache(subject: Subject, found: Comparison) -> None:
    """A left-padded batch in four calls with a cache, all of which but the third get embeddings."""
    subject.require("inputs_embeds")
    ids, mask = padded(subject, unequal(subject), left=True)
    length, start = ids.shape[1], 0
    caches: list[Any] = [None, None]
    for end, embedded in ((length // 2, True), (length - 2, True), (length - 1, False), (length, True)):
        part = slice(start, end)
        named = {name: value[:, part] for name, value in subject.positions(mask).items()}
        inputs = {"attention_mask": mask[:, :end], **named}
        got, caches[0] = subject.resume(ids[:, part], caches[0], embedded=embedded, **inputs)
        expected, caches[1] = subject.resume(ids[:, part], caches[1], **inputs)
        _add(found, got, expected, mask[:, :end])
        start = end


def _compare(subject: Subject, found: Comparison, case: str, ids: Tensor, **inputs: Any) -> None:
    subject.require("inputs_embeds")
    found.case = case
    got, expected = subject.forward(ids, embedded=True, **inputs), subject.forward(ids, **inputs)
    _add(found, got, expected, inputs.get("attention_mask", torch.ones_like(ids)))


def _add(found: Comparison, got: Tensor, expected: Tensor, mask: Tensor) -> None:
    """Compare the logits of real tokens, the last of those that the mask (B, length so far) tells of."""
    before = mask.shape[1] - got.shape[1]
    for number, real in enumerate(mask.bool()):
        start = int(real[:before].sum())
        found.add(got[number][real[before:]], expected[number][real[before:]], sequence=number, start=start)
