"""Previous-token, duplicate-token and induction scores of attention heads, on sequences that repeat themselves.

Shapes: B sequences, T positions, H query heads, G KV heads, W window of the shift.

A sequence consists of `length` distinct random tokens followed by the same tokens again. For the token at t in the
second half, let e be its earlier occurrence. A head without shift is a previous-token head if it attends to t - 1, a
duplicate-token head if it attends to e, and an induction head if it attends to e + 1, the token that should now follow
(Olsson et al. 2022, section "Head activation evaluators").

With KV shift, a head that attends to a position does not read that token alone. Position s has the key
a1 k[s] + a2 k[s-1] and the value b1 v[s] + b2 v[s-1]: attention to s *matches* the keys of s and s - 1, and *moves* the
values of s and s - 1. For coefficients of 0 and 1 this gives:

    alpha   beta    attends to  matches  moves    what the head is
    (1, 0)  (1, 0)  e           e        e        duplicate-token head
    (1, 0)  (1, 0)  e + 1       e + 1    e + 1    induction head, given what an earlier layer wrote at e + 1
    (0, 1)  (1, 0)  e + 1       e        e + 1    induction head in one layer (Theorem 3.3)
    (0, 1)  (0, 1)  e + 1       e        e        duplicate-token head
    (1, 0)  (0, 1)  e           e        e - 1    head that reads the token before the earlier occurrence
    (1, 0)  (0, 1)  e + 2       e + 2    e + 1    induction head, given what earlier layers wrote at e + 2
    any     (1, 0)  t - 1                t - 1    previous-token head
    any     (0, 1)  t                    t - 1    previous-token head that attends to its own position

A head that attends to e never moves e + 1, because the shift only reads earlier tokens and nothing at e depends on what
follows. An induction head attends to the token that it moves or, with beta (0, 1), to the token after it. It matches
the token to which it attends or, with alpha (0, 1), the token before that.

Learned coefficients are mixtures. *Attention* scores are the attention probabilities; *matched* and *moved* scores
distribute them over the tokens that are read, in proportion to the magnitudes |c_i| / sum_j |c_j| of the coefficients:

    matched[t, u] = sum_i share(alpha)_i A[t, u + i],    moved[t, u] = sum_j share(beta)_j A[t, u + j]

The scores lie between 0 and 1, and without shift all three are equal. They ignore the signs of coefficients (a head
with beta (0.34, -0.15) moves a difference), and the norms and contents of keys: `matched` tells which tokens could have
attracted the attention, not which did. A shift of queries (QKV-shift) is not taken into account: e is the earlier
occurrence of the token at t, and a head whose query comes from the token before t matches e - 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.seeds import generator_for
from kvshift_lab.run.callbacks import coefficients
from kvshift_lab.run.repeat_config import RepeatConfig

_LENGTH = 64  # the default, if the vocabulary and the number of positions allow it


@dataclass(frozen=True, kw_only=True)
class HeadScores:
    """Scores of one head, each a mean over sequences and positions.

    Attributes:
        layer, head: indices, from 0; `head` counts query heads.
        attention: attention probability by position attended to: "previous" is t - 1, for every t except the first;
            "earlier-1", "earlier", "earlier+1" ... "earlier+W" are e - 1 ... e + W, for every t in the second half
            except its first.
        matched, moved: the same for the tokens whose keys are matched and whose values are moved, as defined in the
            module's docstring.
        alone: part of the attention that both matches e and moves e + 1 and so needs no other layer:
            sum_i share(alpha)_i share(beta)_{i-1} A[t, e + i]. It is 0 without shift.
    """

    layer: int
    head: int
    attention: Mapping[str, float]
    matched: Mapping[str, float]
    moved: Mapping[str, float]
    alone: float

    @property
    def prefix_matching(self) -> float:
        """Attention to e + 1, the score by which Olsson et al. identify induction heads; it ignores the shift."""
        return self.attention["earlier+1"]

    @property
    def scores(self) -> dict[str, float]:
        """The `moved` scores by which heads are ranked, under their usual names."""
        places = {"previous_token": "previous", "duplicate_token": "earlier", "induction": "earlier+1"}
        return {name: self.moved[place] for name, place in places.items()}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results of `measure_heads`.

    Attributes:
        heads: scores of all heads, layer by layer.
        coefficients: for each layer, {"alpha": (G, W), "beta": (G, W)} as nested lists, with an entry for each shifted
            tensor. Empty if the model has no shift.
        window: window W of the model's shift; 1 if it has none.
        length, rows: length N of a half, and number of sequences.
        uniform: "previous" and "earlier" scores of a head with uniform attention.
        behaviour: the model's loss (in nats) and accuracy on the "first" and the "second" half, each without its first
            token. Only the second half is predictable.
    """

    heads: Sequence[HeadScores]
    coefficients: Sequence[Mapping[str, Any]]
    window: int
    length: int
    rows: int
    uniform: Mapping[str, float]
    behaviour: Mapping[str, Mapping[str, float]]


def repeated_sequences(config: RepeatConfig, *, vocab_size: int, positions: int | None, window: int = 1) -> Tensor:
    """Return the sequences, (config.rows, 2 length), or one token longer with `begin`; equal arguments give equal ones.

    Args:
        config: options of the sequences.
        vocab_size: vocabulary size of the model.
        positions: maximum number of positions of the model. None: unlimited.
        window: window of the model's shift. It bounds `length` from below, so that the positions that are scored
            remain distinct.
    """
    config.check()
    first = config.lowest_token or 0
    last = vocab_size - 1 if config.highest_token is None else config.highest_token
    if not 0 <= first <= last < vocab_size:
        raise LabError(
            f"lowest_token and highest_token must be token ids of the model, 0 to {vocab_size - 1}, in ascending "
            f"order; got {first} and {last}"
        )
    if config.begin is not None and not 0 <= config.begin < vocab_size:
        raise LabError(f"begin must be a token id of the model, 0 to {vocab_size - 1}, got {config.begin}")
    tokens = [token for token in range(first, last + 1) if token != config.begin]
    longest = len(tokens)
    if positions is not None:
        longest = min(longest, (positions - (config.begin is not None)) // 2)
    length = min(_LENGTH, longest) if config.length is None else config.length
    shortest = 2 * window + 2  # so that the positions around e that are scored, and their lags, lie before t - 1
    if not shortest <= length <= longest:
        places = "" if positions is None else f"the model has {positions} positions, and "
        raise LabError(
            f"length must be {shortest} to {longest} ({places}there are {len(tokens)} tokens to draw from), got "
            f"{length}"
        )
    generator = generator_for("rows that repeat themselves", config.seed)
    order = torch.rand(config.rows, len(tokens), generator=generator).argsort(dim=1)[:, :length]
    once = torch.tensor(tokens)[order]
    begin = [] if config.begin is None else [torch.full((config.rows, 1), config.begin)]
    return torch.cat([*begin, once, once], dim=1)


def shares(coefficients: Any, heads: int) -> Tensor:
    """Return the share of each lag for each query head, (H, W), given coefficients (G, W); for None, ones (H, 1).

    share_i = |c_i| / sum_j |c_j|,    0 if all coefficients are 0
    """
    if coefficients is None:
        return torch.ones(heads, 1)
    size_GW = torch.as_tensor(coefficients, dtype=torch.float32).abs()
    share_GW = size_GW / size_GW.sum(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return share_GW.repeat_interleave(heads // len(share_GW), dim=0)


def attention_scores(
    attention: Tensor, *, length: int, alpha: Any = None, beta: Any = None, layer: int = 0
) -> list[HeadScores]:
    """Compute the scores of the heads of one layer.

    Args:
        attention: attention probabilities (B, H, T, T) on sequences whose last `length` tokens repeat the `length`
            tokens before them.
        length: number of tokens in the repeated part, N.
        alpha, beta: coefficients (G, W) of keys and of values. None: not shifted.
        layer: index of the layer.
    """
    heads, positions = attention.shape[1], attention.shape[-1]
    keys_HW, values_HW = shares(alpha, heads), shares(beta, heads)
    window = max(keys_HW.shape[1], values_HW.shape[1])
    if positions < 2 * length or length < 2 * window + 2:
        raise ValueError(
            f"attention must have at least 2 * length positions, and length must be at least {2 * window + 2}; "
            f"got {positions} positions and length {length}"
        )
    second = positions - length + 1  # not `positions - length`, for which e - 1 may lie before the sequence
    places = {"previous": (1, 1)}  # distance t - s to the position attended to, and first t
    for offset in range(-1, max(window, 2) + 1):
        places[f"earlier{offset:+d}" if offset else "earlier"] = (length - offset, second)

    def read(shares_HW: Tensor) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in range(heads)]
        for name, (back, first) in places.items():
            spread_H = torch.zeros(heads)
            for lag, share_H in enumerate(shares_HW.T):
                spread_H += share_H * _mean_back(attention, back - lag, first)
            for head, value in enumerate(spread_H.tolist()):
                found[head][name] = value
        return found

    plain, matched, moved = read(torch.ones(heads, 1)), read(keys_HW), read(values_HW)
    alone_H = torch.zeros(heads)
    for lag in range(1, min(keys_HW.shape[1], values_HW.shape[1] + 1)):
        alone_H += keys_HW[:, lag] * values_HW[:, lag - 1] * _mean_back(attention, length - lag, second)
    return [
        HeadScores(
            layer=layer,
            head=head,
            attention=plain[head],
            matched=matched[head],
            moved=moved[head],
            alone=float(alone_H[head]),
        )
        for head in range(heads)
    ]


def _mean_back(attention: Tensor, back: int, first: int) -> Tensor:
    """Return the mean of A[t, t - back] over sequences and t >= first, (H,); it is 0 for positions after t."""
    if back < 0:
        return torch.zeros(attention.shape[1])
    values_BHt = attention.diagonal(-back, dim1=-2, dim2=-1)[..., first - back :]
    return values_BHt.mean(dim=(0, 2), dtype=torch.float32).cpu()


@torch.no_grad()
def measure_heads(model: Any, config: RepeatConfig) -> Measured:
    """Score every head of a causal language model of transformers, whose attn_implementation must be "eager".

    Layers without shift are treated as vanilla attention. The model's training or evaluation mode is not changed.
    """
    _check_eager(model)
    shifts = coefficients(model)
    window = max((len(heads[0]) for layer in shifts for heads in layer.values()), default=1)
    ids = sequences_for(model, config, window)
    length = (ids.shape[1] - (config.begin is not None)) // 2
    batches: list[list[HeadScores]] = []
    losses, hits, sizes = [], [], []
    for part in ids.split(config.batch_size):
        logits, attentions = _run(model, part)
        batches.append([score for layer in _by_layer(attentions, shifts, length) for score in layer])
        targets = part[:, 1:].to(logits.device)
        losses.append(F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), targets, reduction="none").cpu())
        hits.append((logits[:, :-1].argmax(-1) == targets).float().cpu())
        sizes.append(len(part))
    loss, hit = torch.cat(losses), torch.cat(hits)
    halves = {"first": slice(-2 * length + 1, -length), "second": slice(1 - length, None)}  # slices of the targets
    positions = ids.shape[1]
    return Measured(
        heads=[_mean(scores, sizes) for scores in zip(*batches, strict=True)],
        coefficients=shifts,
        window=window,
        length=length,
        rows=config.rows,
        uniform={
            "previous": statistics.fmean(1 / (t + 1) for t in range(1, positions)),
            "earlier": statistics.fmean(1 / (t + 1) for t in range(positions - length + 1, positions)),
        },
        behaviour={
            name: {"loss": float(loss[:, half].mean()), "accuracy": float(hit[:, half].mean())}
            for name, half in halves.items()
        },
    )


def sequences_for(model: Any, config: RepeatConfig, window: int = 1) -> Tensor:
    """Return `repeated_sequences` for a model's vocabulary and number of positions."""
    text = model.config.get_text_config()
    vocab_size = model.get_input_embeddings().num_embeddings
    positions = getattr(text, "max_position_embeddings", None)
    return repeated_sequences(config, vocab_size=vocab_size, positions=positions, window=window)


@torch.no_grad()
def attention_maps(model: Any, ids: Sequence[int] | Tensor, heads: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the attention probabilities [query, key], (T, T), of each (layer, head) in `heads` on one sequence."""
    _check_eager(model)
    _, attentions = _run(model, torch.as_tensor(ids).reshape(1, -1))
    return [attentions[layer][0, head].float().cpu() for layer, head in heads]


def _run(model: Any, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    output = model(input_ids=ids.to(model.device), output_attentions=True, use_cache=False)
    if not output.attentions or any(layer is None for layer in output.attentions):
        raise LabError(f"model: {type(model).__name__} has layers that return no attention probabilities")
    return output.logits, output.attentions


def _by_layer(attentions: Sequence[Tensor], shifts: Sequence[Mapping[str, Any]], length: int) -> list[list[HeadScores]]:
    if shifts and len(shifts) != len(attentions):
        raise LabError(
            f"model: {len(shifts)} of its {len(attentions)} attention layers shift keys or values, and it is not known "
            "which; expected all or none"
        )
    by_layer = shifts or [{}] * len(attentions)
    return [
        attention_scores(attention, length=length, alpha=shift.get("alpha"), beta=shift.get("beta"), layer=number)
        for number, (attention, shift) in enumerate(zip(attentions, by_layer, strict=True))
    ]


def _mean(scores: Sequence[HeadScores], rows: Sequence[int]) -> HeadScores:
    """Average the scores of one head over batches, weighted by their numbers of sequences `rows`."""

    def over(kind: str) -> dict[str, float]:
        places = getattr(scores[0], kind)
        return {place: statistics.fmean([getattr(score, kind)[place] for score in scores], rows) for place in places}

    means: dict[str, Any] = {kind: over(kind) for kind in ("attention", "matched", "moved")}
    return replace(scores[0], **means, alone=statistics.fmean([score.alone for score in scores], rows))


def _check_eager(model: Any) -> None:
    found = model.config._attn_implementation
    if found != "eager":
        raise ValueError(f'model must have attn_implementation="eager", to return probabilities; got {found!r}')
