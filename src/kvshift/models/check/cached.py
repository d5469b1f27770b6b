"""Forward passes with a cache: any split of a sequence must give what the whole gives without one.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle, pairwise, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from kvshift.models.check.batches import padded, unequal
from kvshift.models.check.findings import Comparison, NotSupportedError
from kvshift.models.check.subject import Subject

__all__ = [
    "batch_by_token",
    "chunked_prefill",
    "default_positions",
    "every_split",
    "left_padding_splits",
    "right_padding_continued",
    "static_reset",
    "token_by_token",
]


def token_by_token(subject: Subject, found: Comparison) -> None:
    """A cache that begins with one token and grows by one."""
    tokens = subject.tokens(1, subject.length)
    _feed(subject, found, tokens, [1] * tokens.shape[1])


def default_positions(subject: Subject, found: Comparison) -> None:
    """Calls of 1, 1, 3, 2, 5, 1 ... tokens without position_ids: the model counts on from the cache."""
    tokens = subject.tokens(1, subject.length)
    _feed(subject, found, tokens, _calls(subject.length), positions=False)


def _calls(length: int) -> list[int]:
    """How many tokens each call gets: 1, 1, 3, 2, 5 and so on, as far as `length` goes."""
    ends = [*takewhile(lambda end: end < length, accumulate(cycle((1, 1, 3, 2, 5)), initial=0)), length]
    return [end - start for start, end in pairwise(ends)]


def batch_by_token(subject: Subject, found: Comparison) -> None:
    """The same for a batch: no sequence gets the state of another."""
    ids = subject.tokens(3, subject.length // 2)
    _feed(subject, found, ids, [3] + [1] * (ids.shape[1] - 3))


def every_split(subject: Subject, found: Comparison) -> None:
    """Two calls, for every place where the second may begin."""
    tokens = subject.tokens(1, subject.length)
    length = tokens.shape[1]
    for first in range(1, length):
        found.case = f"split at {first}"
        _feed(subject, found, tokens, [first, length - first])


def chunked_prefill(subject: Subject, found: Comparison) -> None:
    """A left-padded batch in calls of ... 5, 2, 3, 1, 1 tokens: the last but one holds padding of one sequence."""
    _feed_padded(subject, found, unequal(subject), _calls(subject.length)[::-1])


def _feed(
    subject: Subject,
    found: Comparison,
    ids: Tensor,
    sizes: Sequence[int],
    cache: Any = None,
    positions: bool = True,
) -> Any:
    """Feed a batch in calls of these sizes, each from the cache of the one before; position_ids are given or not."""
    start = 0
    named = subject.positions(torch.ones_like(ids)) if positions else {}
    for size in sizes:
        part = slice(start, start + size)
        logits, cache = subject.resume(ids[:, part], cache, **{name: value[:, part] for name, value in named.items()})
        for number, (got, tokens) in enumerate(zip(logits, ids, strict=True)):
            found.add(got, subject.alone(tokens)[part], sequence=number, start=start)
        start += size
    return cache


def left_padding_splits(subject: Subject, found: Comparison) -> None:
    """A left-padded batch in two calls, also where the first holds nothing but padding of some sequences."""
    sequences, length = unequal(subject), subject.length
    for first in sorted({1, 2, length // 2, length - 3, length - 1}):
        found.case = f"split at {first}"
        _feed_padded(subject, found, sequences, [first, length - first])


def _feed_padded(subject: Subject, found: Comparison, sequences: list[Tensor], sizes: Sequence[int]) -> None:
    """Feed a left-padded batch in calls of these sizes, each from the cache of the one before."""
    ids, mask = padded(subject, sequences, left=True)
    cache, start = None, 0
    for size in sizes:
        part = slice(start, start + size)
        named = {name: value[:, part] for name, value in subject.positions(mask).items()}
        logits, cache = subject.resume(ids[:, part], cache, attention_mask=mask[:, : part.stop], **named)
        for number, (got, tokens) in enumerate(zip(logits, sequences, strict=True)):
            real = mask[number, part].bool()
            before = int(mask[number, :start].sum())
            expected = subject.alone(tokens)[before : before + int(real.sum())]
            found.add(got[real], expected, sequence=number, start=before)
        start += size


def right_padding_continued(subject: Subject, found: Comparison) -> None:
    """Tokens after a right-padded prompt: the padding stays in the cache, and the mask says so."""
    prompts, steps = unequal(subject), 3
    ids, mask = padded(subject, prompts, left=False)
    new = subject.tokens(len(prompts), steps)
    truths = [subject.alone(torch.cat(both)) for both in zip(prompts, new, strict=True)]
    found.case = "prompt"
    logits, cache = subject.resume(ids, attention_mask=mask, **subject.positions(mask))
    for number, (got, tokens, truth) in enumerate(zip(logits, prompts, truths, strict=True)):
        found.add(got[: len(tokens)], truth[: len(tokens)], sequence=number)
    for step in range(steps):
        found.case = f"token {step + 1} after the prompt"
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        named = {name: value[:, -1:] for name, value in subject.positions(mask).items()}
        logits, cache = subject.resume(new[:, step : step + 1], cache, attention_mask=mask, **named)
        for number, (got, tokens, truth) in enumerate(zip(logits, prompts, truths, strict=True)):
            place = len(tokens) + step
            found.add(got, truth[place : place + 1], sequence=number, start=place)


def static_reset(subject: Subject, found: Comparison) -> None:
    """A static cache, filled in several calls, reset, and filled again with other tokens."""
    if subject.cache == "state":
        raise NotSupportedError("forward takes no cache of transformers")
    length = subject.length
    cache = StaticCache(config=subject.model.config, max_cache_len=length + 3)
    for case in ("static cache", "after reset"):
        found.case = case
        cache = _feed(subject, found, subject.tokens(2, length), [length // 2, 1, length - length // 2 - 1], cache)
        cache.reset()
