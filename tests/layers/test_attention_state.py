"""Several calls of the layer: pieces, padding, packs, and the methods of the state passed between calls."""

import dataclasses
from typing import Any

import pytest
import torch

from kvshift import AttentionState
from tests.layers.attention_cases import (
    GQA,
    VARIED,
    B,
    D,
    T,
    close,
    close_all,
    close_states,
    feed,
    gradients,
    make,
    run,
    tokens,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
@torch.no_grad()
def test_every_split_equals_the_whole(options, dtype):
    layer = make(dtype=dtype, **options)
    x = tokens(B, T, dtype=dtype)
    whole, last = layer(x)
    for sizes in [*([i, T - i] for i in range(T + 1)), [2, 0, 5, 4], [1] * T]:
        outs, state = run(layer, *x.split(sizes, dim=1))
        close(torch.cat(outs, dim=1), whole)
        close_states(layer, state, last)


# Calls of `feed`, with the number of tokens of each sequence.
FED: dict[str, list[tuple[str, list[int]]]] = {
    "pack": [("pack", [3, 0, 1, 5, 2])],
    "pack with padding": [("pack between", [3, 0, 1, 5])],
    "padding": [("left", [11, 7, 1, 0])],
    "padding on the right": [("right", [0, 4, 9])],
    "padding in between": [("between", [3, 0, 2])],
    "pieces": [("batch", [4, 4]), ("batch", [1, 1]), ("batch", [6, 6])],
    "ragged pieces": [("left", [3, 5, 4, 0]), ("batch", [1] * 4), ("between", [1, 0, 3, 1]), ("right", [2, 2, 0, 2])],
    "packs and batches": [
        ("pack", [3, 0, 1, 4]),
        ("batch", [1, 1, 1, 1]),
        ("pack between", [2, 0, 5, 3]),
        ("right", [0, 2, 0, 2]),
        ("pack", [4, 1, 2, 1]),
    ],
    "a token": [("pack", [1, 0]), ("batch", [1, 1])],
    "no token": [("batch", [0, 0]), ("pack", [0, 0]), ("right", [0, 3])],
}


@pytest.mark.parametrize("calls", FED.values(), ids=FED)
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_sequences_that_are_fed_together_are_as_if_alone(options, calls):
    """Tested for outputs, gradients (also through the state) and the last state, with NaN in the padding."""
    layer = make(**options)
    lengths = [*zip(*(lengths for _, lengths in calls), strict=True)]  # the pieces of each sequence
    sequences = [tokens(sum(pieces), seed=s).requires_grad_() for s, pieces in enumerate(lengths)]
    pieces = zip(*(x.split(sizes) for x, sizes in zip(sequences, lengths, strict=True)), strict=True)
    outs, state = [], None
    for (how, _), next_pieces in zip(calls, pieces, strict=True):
        out, state = feed(layer, next_pieces, how, state)
        outs.append(out)
    alone, states = zip(*(layer(x.unsqueeze(0)) for x in sequences), strict=True)
    together = [torch.cat(parts) for parts in zip(*outs, strict=True)]
    for s, (out, expected) in enumerate(zip(together, alone, strict=True)):
        close(out, expected[0])
        close_states(layer, state.select([s]), states[s])
    out, expected = torch.cat(together), torch.cat(alone, dim=1)[0]
    weights = tokens(*out.shape[:1], seed=9)
    close_all(gradients(out, weights, layer, *sequences), gradients(expected, weights, layer, *sequences))


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
@torch.no_grad()
def test_the_last_document_of_a_sequence_continues(options):
    layer = make(**options)
    x, y, z = tokens(B, 5), tokens(B, 4, seed=1), tokens(B, 3, seed=2)
    seq_idx = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [3, 2, 2, 2, 1]])
    more = torch.tensor([[6, 6, 6, 6], [6, 6, 6, 7], [6, 7, 8, 8]])  # the first document continues the previous one
    outs, state = run(layer, (x, {"seq_idx": seq_idx}), (y, {"seq_idx": more}), z)
    joined = torch.cat([x, y, z], dim=1)
    documents = [[12], [2, 6, 4], [1, 3, 2, 1, 5]]
    for b, lengths in enumerate(documents):
        expected, states = zip(*(layer(part) for part in joined[b : b + 1].split(lengths, dim=1)), strict=True)
        close(torch.cat(outs, dim=1)[b : b + 1], torch.cat(expected, dim=1))
        close_states(layer, state.select([b]), states[-1])


@torch.no_grad()
def test_the_number_of_padding_before_a_document_does_not_begin_one():
    layer = make(GQA)
    x, y = tokens(1, 3), tokens(1, 4, seed=1)
    _, state = layer(x)
    mask, seq_idx = torch.tensor([[False, True, True, True]]), torch.tensor([[5, 2, 2, 2]])
    out, after = layer(y, mask=mask, seq_idx=seq_idx, state=state)
    expected, expected_after = layer(torch.cat([x, y[:, 1:]], dim=1))
    close(out[:, 1:], expected[:, 3:])
    close_states(layer, after, expected_after)


@torch.no_grad()
def test_documents_that_have_ended_leave_the_cache():
    """Zeros replace the tokens of ended documents, so that not even a NaN among them can reach a later token."""
    layer = make(shift_targets=())
    x = tokens(1, T)
    x[:, 3] = torch.nan
    _, state = layer(x, seq_idx=(torch.arange(T) > 6).long().unsqueeze(0))
    assert state.seen.tolist() == [4]
    assert not state.k[:, : T - 4].any()
    assert not state.v[:, : T - 4].any()
    close(layer(x[:, :1], state=state)[0], layer(torch.cat([x[:, 7:], x[:, :1]], dim=1))[0][:, 4:])


@torch.no_grad()
def test_the_state_of_a_pack_keeps_sequences_apart():
    """Changing one sequence changes no bit of another when the pack is continued as a batch."""
    layer = make(GQA, dtype=torch.float32)
    bounds, token = torch.tensor([0, 2, 7]), tokens(2, 1, seed=5, dtype=torch.float32)
    results = []
    for changed in (False, True):
        x = tokens(1, 7, dtype=torch.float32)
        if changed:
            x[:, 1] = -50
        _, state = layer(x, cu_seqlens=bounds)
        results.append(layer(token, state=state)[0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[1][0])
    unpacked = state.unpack()
    assert unpacked.packed is None
    assert unpacked.k.shape == (2, 5, 2, D)
    assert not unpacked.k[0, :3].any()
    assert unpacked.unpack() is unpacked


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
@torch.no_grad()
def test_select_and_reorder_move_everything(options):
    layer = make(**options)
    x, y = tokens(B, T), tokens(5, 2, seed=1)
    _, state = layer(x)
    for indices in ([2, 0, 0, 1, 2], torch.tensor([1, 1, 1, 1, 1], dtype=torch.int32)):
        picked = state.select(indices)
        close(layer(y, state=picked)[0], layer(torch.cat([x[indices], y], dim=1))[0][:, T:])
    kept = torch.tensor([True, False, True])
    close(layer(y[:2], state=state.select(kept))[0], layer(torch.cat([x[kept], y[:2]], dim=1))[0][:, T:])
    for nothing in ([], torch.zeros(B, dtype=torch.bool)):
        out, none = layer(y[:0], state=state.select(nothing))
        assert out.shape == (0, *y.shape[1:])
        assert none.sequences == 0
        assert none.select([]).reorder([]) == none
    order = [2, 0, 1]
    close(layer(y[:3], state=state.reorder(order))[0], layer(torch.cat([x[order], y[:3]], dim=1))[0][:, T:])


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
@torch.no_grad()
def test_reset_starts_anew(options):
    layer = make(max_rollback=3, **options)
    x = tokens(2, T)
    _, state = layer(x)
    _, packed = layer(x[:1], cu_seqlens=torch.tensor([0, 5, T]))
    for used in (state, state.crop(2), packed):
        fresh = used.reset()
        assert fresh.seen.tolist() == [0, 0]
        assert fresh.rollback == 3
        out, after = layer(x, state=fresh)
        expected, expected_after = layer(x)
        close(out, expected)
        close_states(layer, after, expected_after)


@torch.no_grad()
def test_a_window_of_one_sees_its_own_token_alone():
    layer = make(sliding_window=1, shift_targets=())
    x = tokens(B, T)
    outs, _ = run(layer, *x.split(1, dim=1))
    close(torch.cat(outs, dim=1), layer.o_proj(layer.v_proj(x)))


@torch.no_grad()
def test_no_state_is_edited():
    layer = make(GQA, max_rollback=2, shift_targets=("q", "k", "v"))
    x = tokens(B, T)
    _, state = layer(x)
    before = [part.clone() for part in parts(state)]
    layer(x, state=state)
    _, later = layer(x[:, :1], state=state, mask=torch.ones(B, 1, dtype=torch.bool))
    for made in (later, state.crop(1), state.select([1]), state.reorder([2, 1, 0]), state.reset(), state.clone()):
        for part in parts(made):
            part.fill_(7)
    for part, copy in zip(parts(state), before, strict=True):
        assert torch.equal(part, copy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.k = state.v


def parts(state: AttentionState) -> list[torch.Tensor]:
    return [state.k, state.v, state.seen, state.shift.k, state.shift.v, state.shift.q]


def test_detach_cuts_the_gradient():
    layer = make(shift_targets=("q", "k", "v"))
    x, y = tokens(B, T).requires_grad_(), tokens(B, 2, seed=1).requires_grad_()
    _, state = layer(x)
    out, _ = layer(y, state=state.detach())
    before, now = torch.autograd.grad(out.sum(), [x, y], allow_unused=True)
    assert before is None
    assert now.any()
    close(out, layer(y, state=state)[0])


@torch.no_grad()
def test_to_casts_all_but_the_counts():
    layer = make(GQA, dtype=torch.float32)
    _, state = layer(tokens(B, T, dtype=torch.float32))
    cast = state.to(torch.float64)
    assert {cast.k.dtype, cast.v.dtype, cast.shift.k.dtype, cast.shift.v.dtype} == {torch.float64}
    assert cast.seen.dtype == torch.int64
    token = tokens(B, 1, seed=1)
    close(layer.double()(token, state=cast)[0].float(), layer.float()(token.float(), state=state)[0])
    assert cast.to("meta").k.device.type == cast.to("meta").seen.device.type == "meta"


@pytest.mark.parametrize("targets", [("k", "v"), ("q",)], ids="".join)
@torch.no_grad()
def test_the_suite_sees_a_wrong_state(targets):
    """Each way to lose the previous token changes the next output, so the tests above would fail."""
    layer = make(shift_targets=targets, max_rollback=2)
    x, token = tokens(B, T), tokens(B, 1, seed=1)
    _, state = layer(x)
    right, _ = layer(token, state=state)
    order = [1, 2, 0]
    replace = dataclasses.replace
    wrong = {
        "zeros": replace(state, shift=state.shift.reset()),
        "not reordered": replace(state.reorder(order), shift=state.shift).reorder([2, 0, 1]),
        "not cropped": replace(layer(x[:, :2], state=state)[1].crop(2), shift=layer(x[:, :2], state=state)[1].shift),
        "not counted": replace(state, seen=state.seen - 1),
    }
    for name, mutant in wrong.items():
        out, _ = layer(token, state=mutant)
        assert (out - right).abs().amax((1, 2)).min() > 1e-3, name


# Options of a layer, its arguments besides the state of `make()` for B sequences, and the error message.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fewer sequences": ({}, {"x": tokens(2, 1)}, "state must have 2 sequences, got 3"),
    "more sequences": ({}, {"x": tokens(4, 1)}, "state must have 4 sequences, got 3"),
    "a pack of fewer": ({}, {"x": tokens(1, 9), "cu_seqlens": torch.tensor([0, 0, 9])}, "must have 2 sequences, got 3"),
    "other heads": ({"heads": GQA}, {}, r"k must be \(3, keys, 2, 10\) torch.float64 on cpu, got \(3, 11, 5, 10\)"),
    "another dtype": (
        {"dtype": torch.float32},
        {"x": tokens(B, 1, dtype=torch.float32)},
        r"state.k must be .* torch.float32 on cpu, got .* torch.float64",
    ),
    "no shift": ({}, {"state": make(shift_targets=())(tokens(B, T))[1]}, r"state\.shift is None, but this layer"),
    "no queries": ({"shift_targets": ("q", "k")}, {}, "state holds no queries"),
    "fewer rows": ({"shift_window": 3}, {}, r"state\.k must be \(3, rows, 5, 10\) with rows >= 2"),
}


@pytest.mark.parametrize(("options", "changed", "message"), REFUSED.values(), ids=REFUSED)
def test_a_state_of_another_layer_is_refused(options, changed, message):
    _, state = make()(tokens(B, T))
    with pytest.raises(ValueError, match=message):
        make(**options)(**{"x": tokens(B, 1), "state": state, **changed})
