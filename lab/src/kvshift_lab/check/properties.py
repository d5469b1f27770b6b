"""The properties by name, in the order in which they are checked; docs/check.md describes them.

Shapes: B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import accumulate, chain, cycle, pairwise, takewhile

import torch
from torch import Tensor
from transformers import StaticCache

from kvshift_lab.check.findings import NotSupportedError
from kvshift_lab.check.generated import assisted, beams, greedy, prompt_lookup
from kvshift_lab.check.inputs import Batch, draw_sequences, one_pack, padded, padded_packs, several_packs, unpadded
from kvshift_lab.check.subject import Subject

MASK = ("attention_mask",)
PACKED = ("position_ids",)
PADDED = (*MASK, *PACKED)
ALSO_SINGLE = {"batch of 4": slice(4), "batch of 1": slice(3, 4)}  # selections from `draw_sequences`
CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def same_bits(subject: Subject) -> None:
    """Check that the same call gives the same bits, also after another call."""
    ids, others = subject.tokens(2, subject.length), subject.tokens(3, subject.length // 2)
    batch = Batch(subject, ids)
    first = batch.forward()
    subject.result.tolerance, subject.result.case = 0.0, "at once"
    batch.compare(batch.forward(), reference=first)
    subject.result.case = "after another batch"
    subject.forward(others)
    batch.compare(batch.forward(), reference=first)


def causality(subject: Subject) -> None:
    """Check that the logits of a position have no gradient with respect to later tokens."""
    ids = subject.tokens(1, subject.length)
    for t, size_T in enumerate(subject.gradients(ids, torch.arange(subject.length).split(1))):
        subject.result.case = f"position {t}"
        subject.result.add_errors(size_T[t + 1 :], start=t + 1)


def compare_with_reference(
    batches: Iterable[Batch], names: Iterable[str] = (), sizes: Iterable[int] | None = None
) -> None:
    """Check that each sequence of a batch gets the same logits as alone.

    Args:
        names: names of the arguments that say where the sequences are.
        sizes: numbers of columns in successive calls with a cache; None: one call without a cache.
    """
    for batch in batches:
        batch.subject.result.case = batch.case
        if sizes is None:
            batch.compare(batch.forward(names))
        else:
            batch.compare_calls(sizes, names)


def left_padding_mask_alone(subject: Subject) -> None:
    """Check left padding without position_ids, for models in which only relative positions matter."""
    if subject.accepts("position_ids") and not subject.agrees_with_first_position(subject.first_position + 5):
        raise NotSupportedError("positions are absolute: a left-padded batch needs position_ids")
    compare_with_reference(padded(subject, "left", ALSO_SINGLE, subject.length), MASK)


def documents(subject: Subject, packs: Iterable[Batch], *names: str) -> None:
    """Check that documents marked by these arguments do not see each other."""
    with _require_arguments(subject, names):
        compare_with_reference(packs, names)


def documents_continued(subject: Subject, packs: Iterable[Batch], *names: str) -> None:
    """Check the same in a call that fills a cache, then in calls that continue the last document of each row.

    No padding may follow the last document of a row.
    """
    with _require_arguments(subject, names):
        for batch in packs:
            compare_with_reference([batch], names, [batch.width])
            if subject.result.first is None:
                subject.reseed()  # the same tokens after every pack
                batch.extend(subject.tokens(2).expand(len(batch.ids), 2))
                _compare_new_tokens(batch, names, "after the pack")


def documents_in_chunks(subject: Subject) -> None:
    """Check a pack that is fed in three calls; the second and the third begin within a document."""
    (batch,) = one_pack(subject)
    starts = [sequence.columns[0] for sequence in batch.sequences]
    ends = (0, starts[1] - 1, (starts[2] + starts[3]) // 2, batch.width)
    with _require_arguments(subject, PACKED):
        logits = [batch.feed(end - start, PACKED) for start, end in pairwise(ends)]
        batch.compare(torch.cat(logits, dim=1))


def document_gradients(subject: Subject) -> None:
    """Check that the logits of a document have no gradient with respect to the tokens of another."""
    (batch,) = one_pack(subject)
    with _require_arguments(subject, PACKED):
        sizes = subject.gradients(
            batch.ids, [sequence.columns for sequence in batch.sequences], **batch.arguments(PACKED)
        )
        for sequence, size_T in zip(batch.sequences, sizes, strict=True):
            subject.result.case = sequence.label
            size_T[sequence.columns] = 0
            subject.result.add_errors(size_T)


@contextmanager
def _require_arguments(subject: Subject, arguments: Iterable[str]) -> Iterator[None]:
    """Raise NotSupportedError if documents are marked only by arguments that `forward` does not take, or ignores."""
    names = [name for name in arguments if name != "attention_mask"]
    try:
        yield
    except (TypeError, ValueError) as error:
        message = str(error)
        missing = [name for name in names if f"'{name}'" in message]
        if missing and ("unexpected keyword argument" in message or "not used by the model" in message):
            raise NotSupportedError(f"forward has no argument {missing[0]}") from error
        raise
    if subject.result.first is not None and not any(map(subject.accepts, names)):
        subject.reseed()
        (batch,) = one_pack(subject)
        if torch.equal(batch.forward(names), batch.forward()):
            subject.result.first = None
            raise NotSupportedError(f"{names[0]} has no effect")


def embedded(batches: Iterable[Batch], *names: str) -> None:
    """Check that a call with the embeddings of tokens gives the same logits as one with the tokens."""
    for batch in batches:
        for name in (*names, "inputs_embeds"):
            if name != "attention_mask":  # a model may take it without naming it
                batch.subject.require(name)
        batch.subject.result.case = batch.case
        batch.compare(batch.forward(names, embedded=True), reference=batch.forward(names))


def embedded_with_cache(subject: Subject) -> None:
    """Check a left-padded batch in four calls with a cache, all of which except the third get embeddings."""
    subject.require("inputs_embeds")
    (batch,) = padded(subject, "left")
    by_tokens, half = copy(batch), batch.width // 2
    for size, embeds in ((half, True), (batch.width - half - 2, True), (1, False), (1, True)):
        start = batch.column
        logits = batch.feed(size, PADDED, embedded=embeds)
        batch.compare(logits, start=start, reference=by_tokens.feed(size, PADDED))


def _irregular(length: int) -> list[int]:
    """Return the sizes 1, 1, 3, 2, 5, repeated until they add up to `length`."""
    ends = accumulate(cycle((1, 1, 3, 2, 5)), initial=0)
    return [end - start for start, end in pairwise([*takewhile(length.__gt__, ends), length])]


def splits(subject: Subject, rows: Iterable[Tensor], firsts: Iterable[int], names: Iterable[str]) -> None:
    """Check a left-padded batch in two calls, for each of these sizes of the first, which may hold only padding."""
    for first in firsts:
        batch = Batch(subject, rows, f"split at {first}", "left")
        compare_with_reference([batch], names, [first, batch.width - first])


def right_padding_continued(subject: Subject) -> None:
    """Check tokens after a right-padded prompt; the padding stays in the cache and the mask marks it."""
    (batch,) = padded(subject, "right")
    prompt = batch.width
    batch.extend(subject.tokens(len(batch.ids), 3))
    subject.result.case = "prompt"
    batch.compare_calls([prompt], PADDED)
    _compare_new_tokens(batch, PADDED, "after the prompt")


def _compare_new_tokens(batch: Batch, names: Iterable[str], where: str) -> None:
    """Feed and compare the remaining columns one by one."""
    for number in range(1, batch.width - batch.column + 1):
        batch.subject.result.case = f"{batch.case}, token {number} {where}".removeprefix(", ")
        batch.compare_calls([1], names)


def static_reset(subject: Subject) -> None:
    """Check a static cache that is filled in several calls, reset, and filled again with other tokens."""
    if subject.cache == "state":
        raise NotSupportedError("forward takes no cache of transformers")
    n = subject.length
    cache = StaticCache(config=subject.model.config, max_cache_len=n + 3)
    for batch in unpadded(subject, {"static cache": (2, n), "after reset": (2, n)}):
        batch.cache = cache
        compare_with_reference([batch], PACKED, [n // 2, 1, n - n // 2 - 1])
        cache = batch.cache
        cache.reset()


PROPERTIES: dict[str, Callable[[Subject], None]] = {
    "same bits twice": same_bits,
    "causality": causality,
    "batch": lambda m: compare_with_reference(unpadded(m, {"": (3, m.length)})),
    "left padding": lambda m: compare_with_reference(padded(m, "left", ALSO_SINGLE, m.length), PADDED),
    "left padding: mask alone": left_padding_mask_alone,
    "right padding": lambda m: compare_with_reference(padded(m, "right", ALSO_SINGLE, m.length), MASK),
    "documents: position_ids": lambda m: documents(m, one_pack(m), *PACKED),
    "documents: position_ids, mask": lambda m: documents(m, one_pack(m), *PACKED, *MASK),
    "documents: position_ids, cache": lambda m: documents_continued(m, one_pack(m), *PACKED),
    "documents: seq_idx": lambda m: documents(m, one_pack(m), "seq_idx"),
    "documents: cu_seq_lens": lambda m: documents(m, one_pack(m), *CU_SEQ_LENS),
    "documents: all of these": lambda m: documents(m, one_pack(m), *PACKED, "seq_idx", *CU_SEQ_LENS),
    "documents: gradients": document_gradients,
    "documents: several rows": lambda m: documents(m, several_packs(m, (0, 1, 2), (2, 0)), *PACKED),
    "documents: several rows, seq_idx": lambda m: documents(m, several_packs(m, (2, 1, 0)), "seq_idx"),
    "documents: several rows, cache": lambda m: documents_continued(m, several_packs(m, (0, 1, 2)), *PACKED),
    "documents: padding": lambda m: documents(m, padded_packs(m, "left", "right", "inner"), *PACKED, *MASK),
    "documents: padding, seq_idx": lambda m: documents(m, padded_packs(m, "right"), "seq_idx", *MASK),
    "documents: padding, cache": lambda m: documents_continued(m, padded_packs(m, "left"), *PACKED, *MASK),
    "documents: chunked prefill": documents_in_chunks,
    "inputs_embeds": lambda m: embedded(unpadded(m, {"batch of 3": (3, m.length), "one token": (1, 1)})),
    "inputs_embeds: padding": lambda m: embedded(
        chain(*(padded(m, side, {f"{side} padding": slice(4)}) for side in ("left", "right"))), *MASK
    ),
    "inputs_embeds: documents": lambda m: embedded(one_pack(m), *PACKED),
    "inputs_embeds: cache": embedded_with_cache,
    "cache: token by token": lambda m: compare_with_reference(unpadded(m, {"": (1, m.length)}), PACKED, [1] * m.length),
    "cache: without position_ids": lambda m: compare_with_reference(
        unpadded(m, {"": (1, m.length)}), (), _irregular(m.length)
    ),
    "cache: every split": lambda m: splits(m, m.tokens(1, m.length), range(1, m.length), PACKED),
    "cache: batch": lambda m: compare_with_reference(
        unpadded(m, {"": (3, m.length // 2)}), PACKED, [3] + [1] * (m.length // 2 - 3)
    ),
    "cache: chunked prefill": lambda m: compare_with_reference(padded(m, "left"), PADDED, _irregular(m.length)[::-1]),
    "cache: left padding": lambda m: splits(
        m, draw_sequences(m), sorted({1, 2, m.length // 2, m.length - 3, m.length - 1}), PADDED
    ),
    "cache: right padding": right_padding_continued,
    "cache: static": static_reset,
    "generate: greedy": lambda m: greedy(unpadded(m, {f"prompt of {n}": (1, n) for n in (1, 2, m.length // 2)})),
    "generate: left padding": lambda m: greedy(padded(m, "left")),
    "generate: inputs_embeds": lambda m: greedy(padded(m, "left", {"": slice(2)}), embedded=True),
    "generate: chunked prefill": lambda m: greedy(padded(m, "left", {"": slice(0, None, 3)}), prefill_chunk_size=5),
    "generate: beams": beams,
    "generate: assisted": assisted,
    "generate: prompt lookup": prompt_lookup,
    "generate: static cache": lambda m: greedy(
        unpadded(m, {"first prompts": (2, m.length // 2), "next prompts": (2, m.length // 2)}),
        cache_implementation="static",
    ),
}
"""The properties that `check_model` tests, by name; docs/check.md describes them."""
