"""`generate`: each token and its logits must be those of the sequence alone, without a cache.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvshift.models.check.batches import padded, unequal
from kvshift.models.check.findings import Comparison
from kvshift.models.check.subject import Subject

__all__ = [
    "assisted",
    "beams",
    "chunked_greedy",
    "embedded_greedy",
    "greedy",
    "left_padded_greedy",
    "prompt_lookup",
    "static_cache",
]

_NEW = 6


def greedy(subject: Subject, found: Comparison) -> None:
    """Greedy `generate` from prompts of 1, 2 and more tokens."""
    for length in (1, 2, subject.length // 2):
        found.case = f"prompt of {length}"
        prompt = subject.tokens(1, length)
        _compare(subject, found, list(prompt), subject.generate(prompt, new=_NEW))


def left_padded_greedy(subject: Subject, found: Comparison) -> None:
    """The same for a left-padded batch."""
    prompts = unequal(subject)
    ids, mask = padded(subject, prompts, left=True)
    _compare(subject, found, prompts, subject.generate(ids, mask, new=_NEW))


def embedded_greedy(subject: Subject, found: Comparison) -> None:
    """The same from the embeddings of the prompts, for which `generate` returns the new tokens alone."""
    subject.require("inputs_embeds")
    prompts = unequal(subject)[:2]
    ids, mask = padded(subject, prompts, left=True)
    _compare(subject, found, prompts, subject.generate(ids, mask, new=_NEW, embedded=True))


def chunked_greedy(subject: Subject, found: Comparison) -> None:
    """The same where `generate` feeds the prompts in calls of 5 tokens."""
    prompts = unequal(subject)[::3]
    ids, mask = padded(subject, prompts, left=True)
    _compare(subject, found, prompts, subject.generate(ids, mask, new=_NEW, prefill_chunk_size=5))


def static_cache(subject: Subject, found: Comparison) -> None:
    """`generate` with a static cache, which it keeps and resets for the next prompts."""
    for case in ("first prompts", "next prompts"):
        found.case = case
        prompts = subject.tokens(2, subject.length // 2)
        _compare(subject, found, list(prompts), subject.generate(prompts, new=_NEW, cache_implementation="static"))


def _compare(subject: Subject, found: Comparison, prompts: Sequence[Tensor], output: Any) -> None:
    """Compare what was generated: the logits, and that each token is the largest of the truth's, up to rounding."""
    for number, prompt in enumerate(prompts):
        new = output.sequences[number].cpu()[-len(output.logits) :]
        whole = torch.cat([prompt, new])
        truth = subject.alone(whole)[len(prompt) - 1 : -1]
        got = torch.stack([logits[number].cpu().double() for logits in output.logits])
        missed = truth.amax(1) - truth.gather(1, new.unsqueeze(1)).squeeze(1)
        differences = torch.where(got == truth, 0.0, (got - truth).abs()).amax(1)
        found.errors(torch.maximum(differences, missed / 2), sequence=number, start=len(prompt))


def beams(subject: Subject, found: Comparison) -> None:
    """Beam search: the log-probability of each token of each beam, and the beams themselves, as without a cache."""
    found.of, found.tolerance = "log-probabilities", 2 * found.tolerance
    prompts = subject.tokens(2, subject.length // 3)
    options: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 2, "output_scores": True}
    output = subject.generate(prompts, new=_NEW, **options)
    found.case = "tokens of the beams"
    steps = subject.model.compute_transition_scores(
        output.sequences, output.scores, output.beam_indices, normalize_logits=False
    )
    start = prompts.shape[1]
    for number, (sequence, got) in enumerate(zip(output.sequences.cpu(), steps.cpu().double(), strict=True)):
        difference = (got - _log_probabilities(subject, sequence, start)).abs()
        found.errors(difference, sequence=number // 2, start=start)
    found.case = "beams without a cache"
    expected = subject.generate(prompts, new=_NEW, use_cache=False, **options)
    for number, (got, slow) in enumerate(zip(output.sequences.cpu(), expected.sequences.cpu(), strict=True)):
        if not torch.equal(got, slow):  # then they are as good as each other, by the truth's measure
            scores = [_log_probabilities(subject, sequence, start).sum() for sequence in (got, slow)]
            error = (scores[0] - scores[1]).abs() / _NEW
            found.errors(error.reshape(1), sequence=number // 2, start=start)


def _log_probabilities(subject: Subject, sequence: Tensor, start: int) -> Tensor:
    """Of the tokens from `start` on, by the truth."""
    scores = subject.alone(sequence)[start - 1 : -1].log_softmax(-1)
    return scores.gather(1, sequence[start:].unsqueeze(1)).squeeze(1)


def assisted(subject: Subject, found: Comparison) -> None:
    """Drafts of which 0 to 4 tokens are right, by a candidate generator that knows the truth."""
    new = 2 * _NEW
    prompt = subject.tokens(subject.length // 2)
    drafts = _Drafts(subject.greedy(prompt, new + 5), subject.vocabulary)
    with _drafting(subject.model, lambda make, options: drafts):
        output = subject.generate(prompt.unsqueeze(0), new=new, prompt_lookup_num_tokens=4)
    _compare(subject, found, [prompt], output)
    found.remark = f"{drafts.rejected} draft tokens rejected"


def prompt_lookup(subject: Subject, found: Comparison) -> None:
    """Drafts that the prompt suggests, which repeats itself."""
    pattern = subject.tokens(max(subject.length // 4, 3))
    prompt = torch.cat([pattern, pattern, pattern[:2]])
    counts: list[_Counted] = []

    def counted(make: Callable, options: dict[str, Any]) -> Any:
        counts.append(_Counted(make(**options)))
        return counts[-1]

    with _drafting(subject.model, counted):
        output = subject.generate(prompt.unsqueeze(0), new=2 * _NEW, prompt_lookup_num_tokens=3)
    _compare(subject, found, [prompt], output)
    found.remark = f"{counts[0].rejected} draft tokens rejected"


@contextmanager
def _drafting(model: Any, wrap: Callable[[Callable, dict[str, Any]], Any]) -> Iterator[None]:
    """Have `generate` take the candidate generator that `wrap` makes of its own."""
    make = model._get_candidate_generator
    model._get_candidate_generator = lambda **options: wrap(make, options)
    try:
        yield
    finally:
        del model._get_candidate_generator


class _Counting:
    """Counts the rejected tokens of drafts: `drafted` is how many the last one had."""

    requires_model_outputs = False

    def __init__(self) -> None:
        self.drafted = self.rejected = 0

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        self.rejected += self.drafted - int(num_matches)


class _Counted(_Counting):
    """A candidate generator of transformers."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def get_candidates(self, input_ids: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        candidates, logits = self.inner.get_candidates(input_ids, **options)
        self.drafted = candidates.shape[1] - input_ids.shape[1]
        return candidates, logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        super().update_candidate_strategy(input_ids, scores, num_matches)
        self.inner.update_candidate_strategy(input_ids, scores, num_matches)


class _Drafts(_Counting):
    """Drafts of four tokens: 0, 1, 2, 3, 4 right ones in turn, and then wrong ones."""

    def __init__(self, truth: Tensor, vocabulary: Tensor) -> None:
        super().__init__()
        self.truth, self.calls = truth, 0
        self.wrong = vocabulary[:2]

    def get_candidates(self, input_ids: Tensor, **options: Any) -> tuple[Tensor, None]:
        seen, right = input_ids.shape[1], self.calls % 5
        self.calls += 1
        draft = self.truth[seen : seen + 4].clone()
        draft[right:] = torch.where(draft[right:] == self.wrong[0], self.wrong[1], self.wrong[0])
        self.drafted = len(draft)
        return torch.cat([input_ids, draft.unsqueeze(0).to(input_ids.device)], dim=1), None
