"""Checks of `generate`: each token and its logits must be those of the sequence alone, without a cache.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from kvshift_lab.check.findings import differences
from kvshift_lab.check.inputs import Batch
from kvshift_lab.check.subject import Subject

_NEW = 6


def greedy(prompts: Iterable[Batch], embedded: bool = False, new: int = _NEW, **options: Any) -> None:
    """Check greedy `generate` from prompts or their embeddings: logits are right, and each token has the largest."""
    for batch in prompts:
        result = batch.subject.result
        result.case = batch.case
        if embedded:
            batch.subject.require("inputs_embeds")
        output = batch.subject.generate(batch.ids, batch.attention_mask, new=new, embedded=embedded, **options)
        for row, _, prompt, _ in batch.sequences:
            tokens = output.sequences[row].cpu()[-len(output.logits) :]  # without the prompt, if there is one
            reference = batch.subject.reference_logits(torch.cat([prompt, tokens]))[len(prompt) - 1 : -1]
            logits = torch.stack([logits[row].cpu().double() for logits in output.logits])
            missed = reference.amax(1) - reference.gather(1, tokens.unsqueeze(1)).squeeze(1)  # each may be off by half
            errors = torch.maximum(differences(logits, reference), missed / 2)
            result.add_errors(errors, sequence=row, start=len(prompt))


def beams(subject: Subject) -> None:
    """Check that beam search gives the right log-probability of each token, and the same beams as without a cache."""
    result = subject.result
    result.of, result.tolerance = "log-probabilities", 2 * result.tolerance
    prompts = subject.tokens(2, subject.length // 3)
    start = prompts.shape[1]

    def search(**options: Any) -> Any:
        options |= {"num_beams": 4, "num_return_sequences": 2, "output_scores": True}
        return subject.generate(prompts, torch.ones_like(prompts), new=_NEW, **options)

    def log_probabilities(sequence: Tensor) -> Tensor:
        """Return the log-probabilities of the new tokens according to the reference."""
        scores = subject.reference_logits(sequence)[start - 1 : -1].log_softmax(-1)
        return scores.gather(1, sequence[start:].unsqueeze(1)).squeeze(1)

    output = search()
    result.case = "tokens of the beams"
    steps = subject.model.compute_transition_scores(
        output.sequences, output.scores, output.beam_indices, normalize_logits=False
    )
    for number, (sequence, scores) in enumerate(zip(output.sequences.cpu(), steps.cpu().double(), strict=True)):
        result.add_errors((scores - log_probabilities(sequence)).abs(), sequence=number // 2, start=start)
    result.case = "beams without a cache"
    for number, both in enumerate(zip(output.sequences.cpu(), search(use_cache=False).sequences.cpu(), strict=True)):
        if not torch.equal(*both):  # then both must be equally probable by the reference
            cached, uncached = (log_probabilities(sequence).sum() for sequence in both)
            error = (cached - uncached).abs() / _NEW
            result.add_errors(error.reshape(1), sequence=number // 2, start=start)


def assisted(subject: Subject) -> None:
    """Check drafts of four tokens, of which in turn the first 0, 1, 2, 3 and 4 are those of the reference."""
    prompt = subject.tokens(subject.length // 2)
    reference, wrong, right = prompt, subject.vocabulary[:2], cycle(range(5))
    for _ in range(2 * _NEW + 5):
        reference = torch.cat([reference, subject.reference_logits(reference)[-1:].argmax(-1)])

    def draft(input_ids: Tensor, **options: Any) -> tuple[Tensor, None]:
        new, kept = reference[input_ids.shape[1] :][:4].clone(), next(right)
        new[kept:] = torch.where(new[kept:] == wrong[0], wrong[1], wrong[0])
        return torch.cat([input_ids, new.unsqueeze(0).to(input_ids.device)], dim=1), None

    _greedy_with_drafts(subject, prompt, 4, draft)


def prompt_lookup(subject: Subject) -> None:
    """Check drafts by prompt lookup, from a prompt that repeats itself."""
    pattern = subject.tokens(max(subject.length // 4, 3))
    _greedy_with_drafts(subject, torch.cat([pattern, pattern, pattern[:2]]), 3)


def _greedy_with_drafts(subject: Subject, prompt: Tensor, size: int, draft: Callable | None = None) -> None:
    """Check greedy `generate` with drafts of `size` tokens, made by `draft` or, if it is None, by prompt lookup."""
    make, rejected = subject.model._get_candidate_generator, list[int]()

    def counting(**options: Any) -> Any:
        generator = make(**options)
        generator.get_candidates = draft or generator.get_candidates
        generator.update_candidate_strategy = lambda ids, scores, matches: rejected.append(
            scores.shape[1] - 1 - int(matches)  # the scores of a draft, and of the token after it
        )
        return generator

    subject.model._get_candidate_generator = counting
    try:
        greedy([Batch(subject, [prompt])], new=2 * _NEW, prompt_lookup_num_tokens=size)
    finally:
        del subject.model._get_candidate_generator
    subject.result.remark = f"{sum(rejected)} draft tokens rejected"
