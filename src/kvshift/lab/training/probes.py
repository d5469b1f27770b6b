"""Probes of training: at each evaluation, whether the model copies; `docs/probes.md` says how to read them.

*Heads*: the scores of `kvshift analyze` on sequences of different random tokens that come twice, and the loss on the
second half; see `kvshift.lab.training.head_scores`.

*Targets*: the validation loss by kind of target. A token y follows a token x at position t of what x can see: its row,
or, where documents are kept apart, its document in the row. The target y is

    pair_seen      where x was followed by y before: an induction head can answer it
    token_seen     where x was there before, but never followed by y: an induction head answers with another token
    neither        where x was not there before

of the positions t >= 64 (from 0), before which little can have been seen. *Positions*: the mean loss at t = 499 minus
that at t = 49, the "in-context learning score" of Olsson et al. (2022).

Shapes: B sequences, T positions, C columns: all targets, one for each kind, t = 49, t = 499.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvshift.lab.core.errors import LabError
from kvshift.lab.training.head_scores import measure_heads
from kvshift.lab.training.repeat_config import RepeatConfig

KINDS = ("pair_seen", "token_seen", "neither")
SCORES = ("prefix_matching", "previous_token", "duplicate_token", "induction")
_FROM = 64
_EARLY, _LATE = 49, 499
_REPEATS = RepeatConfig(rows=16, batch_size=16)


def kinds_of_targets(input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Of each target but the first token of a row, the number of its kind in `KINDS`, (B, T - 1) int64.

    Args:
        input_ids: (B, T).
        position_ids: (B, T), which are 0 where a document starts; None: a row is one document.
    """
    tokens = int(input_ids.max()) + 1
    first, second = input_ids[:, :-1].long(), input_ids[:, 1:].long()
    if position_ids is not None:
        first = first + tokens * (position_ids[:, :-1] == 0).cumsum(dim=1)
    token, pair = _seen_before(first), _seen_before(first * tokens + second)
    return torch.where(pair, 0, torch.where(token, 1, 2))


def _seen_before(numbers_BT: Tensor) -> Tensor:
    """Whether each number stands in its row before, (B, T)."""
    ordered, places = numbers_BT.sort(dim=1, stable=True)
    again = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return torch.zeros_like(again).scatter(1, places, again)


def probe_targets(losses: Tensor, labels: Tensor, input_ids: Tensor, position_ids: Tensor | None) -> list[Tensor]:
    """The sum of the losses in each column, (B, C) float64, and how many they are, (B, C) int64.

    Args:
        losses: (B, T - 1) of every label but the first; 0 where there is none.
        labels: (B, T); -100 is no label.
        input_ids, position_ids: (B, T); see `kinds_of_targets`.
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
    """Mean losses by name, "loss_pair_seen" ..., the share of each kind, and "late_minus_early".

    What no target is of has no loss: its name is left out.

    Args:
        sums, counts: (B, C) of all sequences, as `probe_targets` gives them.
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
def probe_heads(model: Any, config: RepeatConfig = _REPEATS) -> dict[str, Any]:
    """What the heads do on repeated random tokens; the model is left as it was.

    Returns:
        "heads": of each, "layer", "head", "prefix_matching" (the attention to the token after the earlier occurrence),
        "previous_token", "duplicate_token" and "induction" (what is moved: see `HeadScores.scores`); "repeat_loss" in
        nats and "repeat_accuracy" on the second half; and of each of the four scores the highest of all heads.
    """
    with _in_eager_evaluation(model):
        measured = measure_heads(model, config)
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
        probe_heads(model, RepeatConfig(rows=1))
    except (LabError, ValueError) as error:
        raise LabError(f"probes: the heads of this model cannot be scored: {error}; leave probes out") from error


@contextmanager
def _in_eager_evaluation(model: Any) -> Iterator[None]:
    """Attention that gives its probabilities, and no dropout; afterwards all is as before."""
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
