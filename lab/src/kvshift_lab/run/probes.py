"""Probes, which measure at each evaluation whether the model copies; `docs/probes.md` explains how to read them.

*Heads*: the scores of `kvshift analyze` on sequences of distinct random tokens that are repeated once, and the loss on
the second half; see `kvshift_lab.run.head_scores`.

*Targets*: the validation loss by kind of target. Let the target y follow the token x, at position t of its context: the
row or, if attention is confined to documents, the document. The kind of y is

    pair_seen      if x was followed by y before: an induction head can predict y
    token_seen     if x occurred before, but was never followed by y: an induction head predicts another token
    neither        if x did not occur before

Only positions t >= 64 (from 0) count, as little has occurred before them. *Positions*: the mean loss at t = 499 minus
the mean loss at t = 49, the "in-context learning score" of Olsson et al. (2022).

Shapes: B sequences, T positions, C columns: all targets, each of the three kinds, t = 49, t = 499.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvshift_lab.core.errors import LabError
from kvshift_lab.run.head_scores import measure_heads
from kvshift_lab.run.repeat_config import RepeatConfig

KINDS = ("pair_seen", "token_seen", "neither")
SCORES = ("prefix_matching", "previous_token", "duplicate_token", "induction")
_FROM = 64
_EARLY, _LATE = 49, 499
_REPEATS = RepeatConfig(rows=16, batch_size=16)


def kinds_of_targets(input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Return the index in `KINDS` of each target, (B, T - 1) int64. The first token of a row is no target.

    Args:
        input_ids: token ids, (B, T).
        position_ids: positions, (B, T), which are 0 at the start of each document. None: each row is one document.
    """
    tokens = int(input_ids.max()) + 1
    first, second = input_ids[:, :-1].long(), input_ids[:, 1:].long()
    if position_ids is not None:
        first = first + tokens * (position_ids[:, :-1] == 0).cumsum(dim=1)
    token, pair = _seen_before(first), _seen_before(first * tokens + second)
    return torch.where(pair, 0, torch.where(token, 1, 2))


def _seen_before(numbers_BT: Tensor) -> Tensor:
    """Return whether each number occurs earlier in its row, (B, T) bool."""
    ordered, places = numbers_BT.sort(dim=1, stable=True)
    again = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return torch.zeros_like(again).scatter(1, places, again)


def probe_targets(losses: Tensor, labels: Tensor, input_ids: Tensor, position_ids: Tensor | None) -> list[Tensor]:
    """Return the sum of the losses in each column, (B, C) float64, and their number, (B, C) int64.

    Args:
        losses: loss of each label except the first, (B, T - 1); 0 where there is no label.
        labels: labels, (B, T); -100 marks a position without label.
        input_ids, position_ids: as in `kinds_of_targets`, (B, T).
    """
    position = torch.arange(losses.shape[1], device=losses.device) if position_ids is None else position_ids[:, :-1]
    kinds = torch.where(position >= _FROM, kinds_of_targets(input_ids, position_ids), -1)
    columns = [
        torch.ones_like(kinds, dtype=torch.bool),
        *(kinds == number for number in range(len(KINDS))),
        *((position == place).expand_as(kinds) for place in (_EARLY, _LATE)),
    ]
    known_BTC = torch.stack(columns, dim=2) & (labels[:, 1:] != -100)[..., None]
    return [(losses[..., None] * known_BTC).sum(dim=1), known_BTC.sum(dim=1)]


def summarize_targets(sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Return mean loss and share of each kind, "loss_pair_seen", "share_pair_seen" ..., and "late_minus_early".

    Means over no targets are left out.

    Args:
        sums, counts: results of `probe_targets` for all sequences, (B, C).
    """
    names = ("all", *KINDS, "early", "late")
    count = dict(zip(names, counts.sum(axis=0).tolist(), strict=True))
    total = dict(zip(names, sums.sum(axis=0).tolist(), strict=True))
    loss = {name: total[name] / count[name] for name in names if count[name]}
    targets = sum(count[kind] for kind in KINDS)
    found = {f"loss_{kind}": loss[kind] for kind in KINDS if kind in loss}
    found |= {f"share_{kind}": count[kind] / targets for kind in KINDS if targets}
    if "early" in loss and "late" in loss:
        found["late_minus_early"] = loss["late"] - loss["early"]
    return found


@torch.no_grad()
def probe_heads(model: Any, vocab_size: int | None = None) -> dict[str, Any]:
    """Score all heads on repeated random tokens, and restore the model's modes and attention implementation.

    Args:
        model: a causal language model of transformers.
        vocab_size: number of token ids to draw from; None for all that the model has.

    Returns:
        "heads": for each head, "layer", "head", "prefix_matching" (attention to the token after the earlier
        occurrence), "previous_token", "duplicate_token" and "induction" (see `HeadScores.scores`); the maximum over
        heads of each of the four scores; "repeat_loss" in nats and "repeat_accuracy" on the second half.
    """
    with _in_eager_evaluation(model):
        measured = measure_heads(model, replace(_REPEATS, highest_token=None if vocab_size is None else vocab_size - 1))
    heads = [
        {"layer": head.layer, "head": head.head, "prefix_matching": head.prefix_matching, **head.scores}
        for head in measured.heads
    ]
    return {
        **{score: max(head[score] for head in heads) for score in SCORES},
        "repeat_loss": measured.behaviour["second"]["loss"],
        "repeat_accuracy": measured.behaviour["second"]["accuracy"],
        "heads": heads,
    }


def check_probes(model: Any) -> None:
    """Raise a LabError for a model whose heads cannot be scored."""
    try:
        with _in_eager_evaluation(model):
            measure_heads(model, RepeatConfig(rows=1))
    except (LabError, ValueError) as error:
        raise LabError(f"probes: the heads of this model cannot be scored: {error}; leave probes out") from error


@contextmanager
def _in_eager_evaluation(model: Any) -> Iterator[None]:
    """Use eager attention, which returns its probabilities, and evaluation mode; restore both at the end."""
    modes = [(module, module.training) for module in model.modules()]
    attention = model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        for module, mode in modes:
            module.training = mode
