"""Rollback: taking tokens back from the state of the attention layer, and how many tokens the state keeps for it."""

import pytest
import torch

from kvshift.ops import ShiftState
from tests.layers.attention_cases import GQA, VARIED, B, T, close, close_states, make, run, tokens


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
@torch.no_grad()
def test_decoding_with_rejected_drafts_equals_plain_decoding(options, padded):
    """Up to five tokens are fed, the last of them wrong; the wrong ones are rolled back before the right ones come."""
    layer = make(max_rollback=4, **options)
    x, start = tokens(B, 29), 5
    mask = torch.arange(start) >= torch.tensor([[0], [3], [4]]) if padded else torch.ones(B, start, dtype=torch.bool)
    prompt = torch.where(mask.unsqueeze(2), x[:, :start], torch.nan)
    _, state = layer(prompt, mask=mask) if padded else layer(prompt)
    rng = torch.Generator().manual_seed(0)
    outs, done = [], start
    while done < x.shape[1]:
        fed = min(int(torch.randint(1, 6, (), generator=rng)), x.shape[1] - done)
        wrong = int(torch.randint(0, fed, (), generator=rng))
        right = fed - wrong
        draft = torch.cat([x[:, done : done + right], tokens(B, wrong, seed=done)], dim=1)
        before = state.rollback
        out, state = layer(draft, state=state)
        state = state.crop(wrong)
        assert state.rollback == min(4, before + fed) - wrong
        outs.append(out[:, :right])
        done += right
    for b in range(B):
        alone, alone_state = layer(torch.cat([x[b : b + 1, :start][:, mask[b]], x[b : b + 1, start:]], dim=1))
        close(torch.cat(outs, dim=1)[b], alone[0, start - x.shape[1] :])
        close_states(layer, state.select([b]), alone_state)


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
@torch.no_grad()
def test_crop_reaches_back_over_several_calls_and_a_pack(options):
    layer = make(max_rollback=3, **options)
    x, y = tokens(2, 8), tokens(2, 3, seed=1)
    expected = torch.cat(
        [layer(torch.cat([row[:, :5], y[b : b + 1]], dim=1))[0][:, 5:] for b, row in enumerate(x.split(1))]
    )
    _, state = run(layer, x[:, :4], *x[:, 4:].split(1, dim=1))
    close(layer(y, state=state.crop(1).crop(2))[0], expected)
    _, state = layer(x.flatten(0, 1).unsqueeze(0), cu_seqlens=torch.tensor([0, 8, 16]))
    close(layer(y, state=state.crop(3))[0], expected)


@torch.no_grad()
def test_crop_of_more_than_a_sequence_has_seen_leaves_it_not_begun():
    layer = make(GQA, max_rollback=4)
    x, y = tokens(2, 6), tokens(2, 5, seed=1)
    _, state = layer(x, mask=torch.arange(6) < torch.tensor([[6], [2]]))
    state = state.crop(4)
    assert state.seen.tolist() == [2, 0]
    out, _ = layer(y, state=state)
    close(out[:1], layer(torch.cat([x[:1, :2], y[:1]], dim=1))[0][:, 2:])
    close(out[1:], layer(y[1:])[0])


@pytest.mark.parametrize("targets", [(), ("k", "v")], ids=["plain", "shifted"])
@torch.no_grad()
def test_crop_beyond_the_state_is_refused(targets):
    layer = make(max_rollback=3, shift_targets=targets, shift_window=3)
    _, state = layer(tokens(B, T))
    with pytest.raises(ValueError, match=r"cannot crop 4 tokens: this state can take back 3; .* max_rollback=4"):
        state.crop(4)
    cropped = state.crop(2)
    with pytest.raises(ValueError, match=r"cannot crop 2 tokens: this state can take back 1; .* max_rollback=4"):
        cropped.crop(2)
    _, refilled = layer(tokens(B, 1), state=cropped)
    refilled.crop(2)
    # A sequence of a padded chunk may have received no token.
    _, ragged = layer(tokens(B, 2), state=cropped, mask=torch.ones(B, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="cannot crop 2 tokens"):
        ragged.crop(2)
    with pytest.raises(ValueError, match="tokens must be 0 or more, got -1"):
        state.crop(-1)
    with pytest.raises(ValueError, match="cannot crop 1 tokens: this state can take back 0"):
        make()(tokens(B, T))[1].crop(1)


@pytest.mark.parametrize("max_rollback", [0, 2])
@torch.no_grad()
def test_the_cache_of_a_sliding_window_stays_bounded(max_rollback):
    layer = make(GQA, sliding_window=3, max_rollback=max_rollback)
    _, state = layer(tokens(B, T))
    for i in range(3):
        _, state = layer(tokens(B, 1, seed=i), state=state)
        assert state.k.shape[1] == 3 + max_rollback
    assert state.seen.tolist() == [T + 3] * B


@torch.no_grad()
def test_the_state_is_long_enough_for_the_window_and_the_roll_back():
    layer = make(GQA, shift_window=3, max_rollback=4)
    _, state = layer(tokens(B, T))
    assert isinstance(state.shift, ShiftState)
    assert (state.shift.rows, state.shift.max_rows, state.rollback, state.max_rollback) == (6, 6, 4, 4)
    close(state.shift.k.flatten(2), layer.k_proj(tokens(B, T))[:, -6:])
