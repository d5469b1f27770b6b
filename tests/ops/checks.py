"""The operator's promises as functions, which the tests call.

Each raises AssertionError if `backend` breaks the promise; `test_mutants.py` breaks every one of them.

Shapes: B batch, T positions, S sequences, R rows of state, G KV heads, D head size, W window.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvshift.ops import ShiftState, kv_shift

from .cases import Case, boundaries, outcome, random_case

LENGTHS = [3, 0, 1, 5, 1, 2]  # lengths of packed sequences, including an empty one and single tokens


def check_hand_worked_values(backend: str) -> None:
    """Two heads with one number each and window 3; integers, so nothing is rounded.

    head 0: k = 1, 2, 3, 4    alpha = (1, 10, 100)    before: 7, 8      v = 5, 6, 7, 8    beta = (1, -1, 0)
    head 1: k = 9, 8, 7, 6    alpha = (2, 0, -1)      before: 3, 5      v = 1, 0, 2, 0    beta = (0, 3, 1)
    """
    k = torch.tensor([[[1.0, 9], [2, 8], [3, 7], [4, 6]]]).unsqueeze(3)
    v = torch.tensor([[[5.0, 1], [6, 0], [7, 2], [8, 0]]]).unsqueeze(3)
    before_k = torch.tensor([[[7.0, 3], [8, 5]]]).unsqueeze(3)
    before_v = torch.tensor([[[4.0, 2], [2, 6]]]).unsqueeze(3)
    case = Case(
        k,
        v,
        torch.tensor([[1.0, 10, 100], [2, 0, -1]]),
        torch.tensor([[1.0, -1, 0], [0, 3, 1]]),
        ShiftState(before_k, before_v, 2),
        grads=(
            torch.tensor([[[1.0, 1], [0, 1], [2, 0], [1, -1]]]).unsqueeze(3),
            torch.tensor([[[1.0, 2], [1, 0], [0, 0], [1, 1]]]).unsqueeze(3),
            torch.zeros_like(before_k),
            torch.zeros_like(before_v),
        ),
    )
    expected = {
        # 1 + 80 + 700, 2 + 10 + 800, 3 + 20 + 100, 4 + 30 + 200; 18 - 3, 16 - 5, 14 - 9, 12 - 8
        "k_hat": [[781, 15], [812, 11], [123, 5], [234, 4]],
        # 5 - 2, 6 - 5, 7 - 6, 8 - 7; 3 * 6 + 2, 3 * 1 + 6, 3 * 0 + 1, 3 * 2 + 0
        "v_hat": [[3, 20], [1, 9], [1, 1], [1, 6]],
        "new_state.k": [[3, 7], [4, 6]],
        "new_state.v": [[7, 2], [8, 0]],
        # head 0: 1 + 0 + 200, 0 + 20 + 100, 2 + 10, 1; head 1: 2 - 0, 2 + 1, 0, -2
        "gradient of k": [[201, 2], [120, 3], [12, 0], [1, -2]],
        # head 0: 1 - 1, 1 - 0, 0 - 1, 1; head 1: 0 + 0, 0 + 1, 3 + 0, 0
        "gradient of v": [[0, 0], [1, 1], [-1, 3], [1, 0]],
        # lag 0: 1*1 + 2*3 + 1*4, 9 + 8 - 6; lag 1: 1*8 + 2*2 + 1*3, 5 + 9 - 7; lag 2: 1*7 + 2*1 + 1*2, 3 + 5 - 8
        "gradient of alpha": [[11, 15, 11], [11, 7, 0]],
        # lag 0: 5 + 6 + 8, 2*1 + 0; lag 1: 2 + 5 + 7, 2*6 + 2; lag 2: 4 + 2 + 6, 2*2 + 0
        "gradient of beta": [[19, 14, 12], [2, 14, 4]],
        # position 0 reads the older row of state (lag 2); positions 0 (lag 1) and 1 (lag 2) read the newer
        "gradient of state.k": [[100, -1], [10, -1]],
        "gradient of state.v": [[0, 2], [-1, 6]],
    }
    for name, result in outcome(case, backend).items():
        assert result.squeeze().tolist() == expected[name], f"{name}: {result.squeeze().tolist()}"


def check_documents_do_not_touch(case: Case, backend: str, documents: Sequence[slice], content: float) -> None:
    """Changing the last token of a document leaves every bit of all other documents unchanged.

    `content` replaces the token's key and value and the gradients of its results. The gradients of the coefficients are
    not compared: all documents share them.
    """
    before = outcome(case, backend)
    for changed, document in enumerate(documents):
        if document.start == document.stop:
            continue
        last = document.stop - 1

        def change(x: Tensor, last: int = last) -> Tensor:
            return x.index_fill(1, torch.tensor([last]), content)

        grads = (change(case.grads[0]), change(case.grads[1]), *case.grads[2:])
        after = outcome(replace(case, k=change(case.k), v=change(case.v), grads=grads), backend)
        for name in ("k_hat", "v_hat", "gradient of k", "gradient of v"):
            assert not torch.equal(after[name][:, last], before[name][:, last]), f"{name} must see its own document"
            for other, span in enumerate(documents):
                if other != changed:
                    assert torch.equal(after[name][:, span], before[name][:, span]), (name, changed, other)
        if case.cu_seqlens is not None:  # each sequence has a state
            others = [s for s in range(len(documents)) if s != changed]
            for name in after:
                if "state" in name:
                    assert torch.equal(after[name][others], before[name][others]), (name, changed)


def check_pack_is_its_sequences(case: Case, backend: str, lengths: Sequence[int]) -> None:
    """A pack gives bit for bit the results, states and gradients of its sequences computed separately."""
    packed = outcome(case, backend)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    shared = torch.zeros_like(case.alpha, dtype=torch.float64), torch.zeros_like(case.beta, dtype=torch.float64)
    for s, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        span = slice(end - length, end)
        alone = Case(
            case.k[:, span],
            case.v[:, span],
            case.alpha,
            case.beta,
            case.state and case.state.select([s]),
            mask=None if case.mask is None else case.mask[:, span],
            grads=(*(g[:, span] for g in case.grads[:2]), *(g[s : s + 1] for g in case.grads[2:])),
        )
        for name, result in outcome(alone, backend).items():
            if "alpha" in name or "beta" in name:
                shared["beta" in name].add_(result)
            else:
                part = packed[name][s : s + 1] if "state" in name else packed[name][:, span]
                assert torch.equal(result, part), (name, s)
    torch.testing.assert_close(packed["gradient of alpha"].double(), shared[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed["gradient of beta"].double(), shared[1], rtol=1e-5, atol=1e-5)


def check_pieces_are_the_whole(case: Case, backend: str, *ways: Sequence[int]) -> None:
    """A sequence fed in pieces, with the state passed on, gives every bit of the sequence fed whole.

    Each of the `ways` is a list of positions at which to cut the sequence, or every sequence of a pack.
    """
    whole = case.call(backend)
    for cuts in ways:
        k_hat, v_hat, state = _in_pieces(case, backend, cuts)
        assert torch.equal(k_hat, whole[0]), cuts
        assert torch.equal(v_hat, whole[1]), cuts
        assert state == whole[2]


def _in_pieces(case: Case, backend: str, cuts: Sequence[int]) -> tuple[Tensor, Tensor, ShiftState]:
    positions = case.k.shape[1]
    if case.cu_seqlens is None:
        edges = [0, *cuts, positions]
        pieces = [list(range(start, end)) for start, end in itertools.pairwise(edges)]
        packs = [None] * len(pieces)
    else:
        pieces, packs = _pieces_of_sequences(case.cu_seqlens.tolist(), cuts)
    k_hat, v_hat = torch.full_like(case.k, torch.nan), torch.full_like(case.v, torch.nan)
    state = case.state
    for piece, pack in zip(pieces, packs, strict=True):
        part = replace(
            case,
            k=case.k[:, piece],
            v=case.v[:, piece],
            state=state,
            cu_seqlens=pack,
            seq_idx=None if case.seq_idx is None else case.seq_idx[:, piece],
            mask=None if case.mask is None else case.mask[:, piece],
        )
        k_hat[:, piece], v_hat[:, piece], state = part.call(backend)
    assert state is not None
    return k_hat, v_hat, state


def _pieces_of_sequences(bounds: list[int], cuts: Sequence[int]) -> tuple[list[list[int]], list[Tensor]]:
    """Cut all sequences of a pack at `cuts`; return the positions and the boundaries of each piece of the pack."""
    spans = list(itertools.pairwise(bounds))
    pieces, packs = [], []
    for start, end in zip([0, *cuts], [*cuts, bounds[-1]], strict=True):
        parts = [range(min(first + start, last), min(first + end, last)) for first, last in spans]
        pieces.append([position for part in parts for position in part])
        packs.append(boundaries([len(part) for part in parts]))
    return pieces, packs


def check_padding_is_as_if_absent(backend: str, masks: Sequence[Sequence[int]], rows: int | None, pad: float) -> None:
    """A padded sequence gives at its real tokens every bit of the same sequence without padding, and zero at the pads.

    Keys, values and upstream gradients at the pads are all `pad`.
    """
    mask = torch.tensor(masks, dtype=torch.bool)
    case = random_case(3, *mask.shape, rows=rows, mask=masks)
    k, v, k_grad, v_grad = (
        x.masked_fill(~mask[..., None, None], pad) for x in (case.k, case.v, case.grads[0], case.grads[1])
    )
    padded = outcome(replace(case, k=k, v=v, grads=(k_grad, v_grad, *case.grads[2:])), backend)
    for b, real in enumerate(mask):
        alone = Case(
            k[b : b + 1, real],
            v[b : b + 1, real],
            case.alpha,
            case.beta,
            case.state and case.state.select([b]),
            grads=(k_grad[b : b + 1, real], v_grad[b : b + 1, real], *(g[b : b + 1] for g in case.grads[2:])),
        )
        for name, result in outcome(alone, backend).items():
            if "alpha" in name or "beta" in name:
                assert padded[name].isfinite().all(), name
            elif "state" in name:
                assert torch.equal(padded[name][b : b + 1], result), (name, b)
            else:
                assert torch.equal(padded[name][b : b + 1, real], result), (name, b)
                assert not padded[name][b, ~real].any(), f"{name} must be zero on padding"


def check_reordered_sequences_continue(backend: str) -> None:
    """Reordered beams: sequence i continues as sequence order[i] would have."""
    case = random_case(5, batch=3, positions=2)
    order = [2, 0, 0]
    _, _, state = case.call(backend)
    after = random_case(7, batch=3, positions=1)
    k_hat, v_hat, _ = replace(after, alpha=case.alpha, beta=case.beta, state=state.reorder(order)).call(backend)
    for row, source in enumerate(order):
        k = torch.cat([case.k[source], after.k[row]]).unsqueeze(0)
        v = torch.cat([case.v[source], after.v[row]]).unsqueeze(0)
        k_row, v_row, _ = kv_shift(k, v, case.alpha, case.beta, backend=backend)
        assert torch.equal(k_hat[row, 0], k_row[0, -1]), row
        assert torch.equal(v_hat[row, 0], v_row[0, -1]), row


def check_cropped_tokens_were_never_seen(backend: str, tokens: int, window: int) -> None:
    """Feeding `tokens` more tokens and cropping them off the state again leaves the rest of the sequence unchanged."""
    case = random_case(11, positions=13, rows=window - 1 + 3, window=window)
    drafts = random_case(13, positions=tokens)

    def feed(k: Tensor, v: Tensor, state: ShiftState | None) -> tuple[Tensor, Tensor, ShiftState]:
        return kv_shift(k, v, case.alpha, case.beta, state=state, backend=backend)

    _, _, state = feed(case.k[:, :6], case.v[:, :6], case.state)
    _, _, ahead = feed(drafts.k, drafts.v, state)
    k_hat, v_hat, new_state = feed(case.k[:, 6:], case.v[:, 6:], ahead.crop(tokens, window=window))
    k_plain, v_plain, plain_state = feed(case.k[:, 6:], case.v[:, 6:], state)
    assert torch.equal(k_hat, k_plain)
    assert torch.equal(v_hat, v_plain)
    assert new_state == plain_state


def check_identity_returns_every_bit(case: Case, backend: str) -> None:
    """alpha = beta = (1, 0, ...) is the identity, bit for bit."""
    identity = torch.zeros_like(case.alpha)
    identity[:, 0] = 1
    k_hat, v_hat, _ = replace(case, alpha=identity, beta=identity).call(backend)
    real = torch.ones(case.k.shape[:2], dtype=torch.bool) if case.mask is None else case.mask
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[case.k.dtype.itemsize]
    assert torch.equal(k_hat[real].view(integer), case.k[real].view(integer))
    assert torch.equal(v_hat[real].view(integer), case.v[real].view(integer))


def check_inputs_are_left_alone(case: Case, backend: str) -> None:
    """A call never modifies its inputs, forward or backward, and later edits of the inputs do not reach its results."""

    def tensors(case: Case) -> dict[str, Tensor]:
        given = case.leaves() | case.where() | {f"grads[{i}]": g for i, g in enumerate(case.grads)}
        return {name: x for name, x in given.items() if x is not None}

    before = {name: x.clone() for name, x in tensors(case).items()}
    outcome(case, backend)
    for name, x in tensors(case).items():
        assert torch.equal(x, before[name]), f"{name} was edited"
    k_hat, v_hat, new_state = case.call(backend)
    results = {"k_hat": k_hat, "v_hat": v_hat, "new_state.k": new_state.k, "new_state.v": new_state.v}
    returned = {name: x.clone() for name, x in results.items()}
    for x in tensors(case).values():
        x.zero_()
    for name, result in results.items():
        assert torch.equal(result, returned[name]), f"{name} follows an edit of an input"
