"""Layers, inputs and tolerances that the tests of `KVShiftAttention` share. All sizes are distinct."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvshift import AttentionState, KVShiftAttention, ShiftOptions

B, T, E, D = 3, 11, 37, 10
MHA, GQA = (5, 5), (6, 2)

DOCUMENTS = [3, 0, 1, 5, 2]
BOUNDS = torch.tensor([0, *itertools.accumulate(DOCUMENTS)], dtype=torch.int32)
# Document numbers may decrease, repeat and be negative: only a change matters.
NUMBERS = torch.tensor([7] * 3 + [-1] + [7] * 5 + [4] * 2)

# Documents and padding by name, in two sequences of 11 tokens, or in one that is a pack.
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"mask": torch.arange(11) >= torch.tensor([[10], [4]])},
    "seq_idx": {"seq_idx": torch.tensor([7] * 3 + [4] * 6 + [7] * 2).expand(2, -1)},
    "cu_seqlens": {"cu_seqlens": BOUNDS},
}

# A few combinations that contain every option at least once.
VARIED = {
    "rope": {},
    "alibi-gqa": {"position_encoding": "alibi", "heads": GQA, "qk_norm": True, "bias": True},
    "none-window": {"position_encoding": "none", "sliding_window": 4, "shift_targets": ("q", "k", "v")},
    "rope-gqa-window-lags": {"heads": GQA, "sliding_window": 3, "shift_window": 3, "qk_norm": True},
    "alibi-keys-lags": {"position_encoding": "alibi", "shift_targets": ("k",), "shift_window": 4, "bias": True},
    "rope-gate-queries": {"shift_constraint": "gate", "shift_targets": ("q", "v"), "rope_base": 100.0},
    "plain-window": {"shift_targets": (), "sliding_window": 2, "heads": GQA},
    "plain": {"shift_targets": (), "bias": True},
}


def make(heads: tuple[int, int] = MHA, *, seed: int = 0, dtype: torch.dtype = torch.float64, **options):
    """Return a layer in eval mode, all of whose parameters are random, including gains and biases."""
    layer = KVShiftAttention(E, *heads, head_dim=D, dtype=dtype, **with_shift_options(options)).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            start = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
            parameter.copy_(start / E**0.5 if name.endswith("proj.weight") else 1 + start / 4)
    return layer


def with_shift_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a layer, with `shift_window` and the like turned into fields of `shift_options`."""
    shift = {name.removeprefix("shift_"): value for name, value in options.items() if name.startswith("shift_")}
    rest = {name: value for name, value in options.items() if not name.startswith("shift_")}
    return {**rest, "shift_options": ShiftOptions(**shift)}


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    """Compare fp64 to 1e-12, and smaller dtypes to the rounding of the layer's sums, relative to the largest result.

    An output passes through four sums (projection, scores, values, output) of at most N = 60 products: the D numbers of
    six heads. The errors of N roundings of half a unit each add up to sqrt(N) / 2 units.
    """
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    units = 4 * (6 * D) ** 0.5 / 2 * torch.finfo(expected.dtype).eps
    bound = 1e-12 * max(1.0, scale) if expected.dtype == torch.float64 else units * scale
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


def gradients(out: Tensor, weights: Tensor, layer: KVShiftAttention, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs and of all parameters, for the weighted sum of the output."""
    wanted = [*inputs, *layer.parameters()]
    return torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True, materialize_grads=True)


def outcome(layer: KVShiftAttention, x: Tensor, **where: Any) -> list[Tensor]:
    """Return the output, and the gradients of x and of all trained parameters for the sum of the output's squares."""
    x = x.clone().requires_grad_()
    out, _ = layer(x, **where)
    wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


def same_bits(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def close_all(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        close(a, e)


def left_mask(pads: list[int]) -> Tensor:
    return torch.arange(T) >= torch.tensor(pads).unsqueeze(1)


MASKS = {
    "left": left_mask([0, 4, 10]),
    "right": left_mask([0, 4, 10]).flip(1),
    "between": torch.tensor([[1] * T, [0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0], [0] * T], dtype=torch.bool),
}


def run(layer: KVShiftAttention, *calls: Any) -> tuple[list[Tensor], Any]:
    """Feed the calls one after another, passing the state on; each call is x or (x, arguments)."""
    outs, state = [], None
    for call in calls:
        x, arguments = call if isinstance(call, tuple) else (call, {})
        out, state = layer(x, state=state, **arguments)
        outs.append(out)
    return outs, state


def feed(
    layer: KVShiftAttention, pieces: Sequence[Tensor], how: str, state: AttentionState | None = None
) -> tuple[Sequence[Tensor], AttentionState]:
    """Feed the next tokens of each sequence, (T, E), in one call, with NaN in the padding; return the outputs.

    Args:
        how: "batch" for equal lengths; "left" or "right" for the side of the padding; "between" for padding before and
            after every token; "pack" or "pack between".
    """
    lengths, where, nothing = [len(piece) for piece in pieces], {}, tokens(1) * torch.nan
    if "between" in how:
        pieces = [torch.cat([nothing, *(torch.cat([x[None], nothing]) for x in piece)]) for piece in pieces]
    if "pack" in how:
        x = torch.cat([*pieces]).unsqueeze(0)
        where["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(map(len, pieces))], dtype=torch.int32)
    else:
        side = "left" if how == "left" else "right"
        x = pad_sequence([*pieces], batch_first=True, padding_value=torch.nan, padding_side=side)
    mask = ~x.isnan().any(2)
    if how not in ("batch", "pack"):
        where["mask"] = mask
    out, state = layer(x, state=state, **where)
    assert not out[~mask].any()
    return out[mask].split(lengths), state


def close_states(layer: KVShiftAttention, actual: AttentionState, expected: AttentionState) -> None:
    """Compare all that later calls can see of two states, whatever the number of columns before that."""
    actual, expected = actual.unpack(), expected.unpack()
    assert actual.seen.tolist() == expected.seen.tolist()
    reach = T * T if layer.sliding_window is None else layer.sliding_window - 1 + layer.max_rollback
    for s, seen in enumerate(expected.seen.tolist()):
        shared = min(seen, reach, actual.k.shape[1], expected.k.shape[1])
        for name in ("k", "v"):
            a, e = getattr(actual, name)[s], getattr(expected, name)[s]
            close(a[a.shape[0] - shared :], e[e.shape[0] - shared :])
    if expected.shift is None:
        assert actual.shift is None
        return
    for name in ("k", "v", "q"):
        a, e = getattr(actual.shift, name), getattr(expected.shift, name)
        assert (a is None) == (e is None)
        if e is not None:
            rows = min(a.shape[1], e.shape[1])
            close(a[:, a.shape[1] - rows :], e[:, e.shape[1] - rows :])
