"""KV shift for context parallelism, where every sequence is divided among processes.

The first W - 1 tokens of a chunk are mixed with tokens of another process. `exchange_halo` fetches these tokens, and
`shift_shard` uses them to shift a shard. The layout defines how R ranks share the C-token chunks of a sequence:

    "contiguous"    rank r holds chunk r of R
    "headtail"      rank r holds chunks r and 2R-1-r of 2R, side by side, which balances the cost of causal attention

Shapes: B batch, L tokens of a shard, N chunks of a shard, C = L / N, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kvshift.layers.shift import COEFFICIENT_NAMES
from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.dispatch import choose_backend
from kvshift.ops.shift import check_coefficients, check_input, check_tensor
from kvshift.ops.state import ShiftState

Layout = Literal["contiguous", "headtail"]
_DIFFER = "shards must have the same shapes, dtype, window and layout on every rank of the group"


def shift_shard(
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    *,
    q: Tensor | None = None,
    gamma: Tensor | None = None,
    positions: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Shift this rank's part of every sequence, with the same result as `kvshift.kv_shift` on the whole sequence.

        k_hat[t] = alpha[:, 0] * k[t] + alpha[:, 1] * k[t-1] + ... + alpha[:, W-1] * k[t-W+1]

    The same applies to v with beta and to q with gamma. Lag j is read exactly where positions[t] >= j. The result has
    the same bits as in a single process. Every rank of the group must call this function with shards of the same
    length and, if one rank differentiates the result, all must, because the gradients of fetched tokens are sent back
    to the ranks that own them. The gradients of the coefficients are those of this shard; sum them over the group, as
    for any other weight.

    All tokens are fetched in one exchange (`exchange_halo`).

    Args:
        k: raw keys, after projection and before QK-norm and rotary embedding, (B, L, G, Dk).
        v: raw values, (B, L, G, Dv).
        alpha, beta: coefficients, (G, W), for example from `KVShift.coefficients()`. If None, k or v is not shifted.
        q, gamma: raw queries, (B, L, H, Dk), and their coefficients, (H, W), if queries are shifted too.
        positions: position of each token of this shard in its document, counted from 0, (B, L) or (1, L) integers.
            None if each row of the batch is one document.
        group, layout: as in `exchange_halo`.
        backend: as in `kv_shift`.

    Returns:
        q (unchanged if it is not shifted), k_hat and v_hat.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype or shape; the message names it. If this is so on
            some ranks only, or if the ranks differ, every rank raises an error, as described at `exchange_halo`.

    Source:
        Equation 5 of the paper, for sharded sequences.
    """
    given, mixes = cast(dict[str, Any], {"k": k, "v": v, "q": q}), {"q": gamma, "k": alpha, "v": beta}
    shifted = {name: given[name] for name, mix in mixes.items() if mix is not None}
    if not shifted:  # unless another rank shifts something, and waits for this one
        _check_together({"k": k, "v": v}, None, layout, group)
        return q, k, v
    try:
        choose_backend(backend)
        for name, x in given.items():
            if name in shifted or x is not None:
                check_input(name, x)
                if x.shape[:2] != k.shape[:2]:
                    batch_length, found = tuple(k.shape[:2]), tuple(x.shape[:2])
                    raise ValueError(f"{name} must have the batch and length of k, {batch_length}, got {found}")
        for name, x in shifted.items():
            check_coefficients(COEFFICIENT_NAMES[name], cast(Tensor, mixes[name]), x)
        windows = sorted({mix.shape[1] for mix in mixes.values() if mix is not None})
        if len(windows) > 1:
            raise ValueError(f"alpha, beta and gamma must have the same window, got {windows}")
        if positions is not None:
            _check_positions(positions, k)
    except (TypeError, ValueError) as problem:
        _check_together({"k": k, "v": v}, None, layout, group, problem)
        raise
    rows = windows[0] - 1
    halos = _exchange(shifted, rows, group, layout)
    chunks, documents, same_document = _chunks_of_shard(layout), None, None
    if positions is not None:
        positions = _by_chunk(positions.expand(k.shape[0], -1), chunks)
        documents = (positions == 0).cumsum(1)
        lags = torch.arange(rows, 0, -1, device=k.device)  # from the first token of a chunk to the rows of its halo
        same_document = (positions[:, :1] >= lags)[..., None, None]
    by_chunk: Any = {name: None if x is None else _by_chunk(x, chunks) for name, x in given.items()}
    states = {name: x.new_zeros(x.shape[0], rows, *x.shape[2:]) for name, x in by_chunk.items() if x is not None}
    for name, halo in zip(shifted, halos, strict=True):
        before = halo.flatten(0, 1)
        states[name] = before if same_document is None else torch.where(same_document, before, 0)
    state = ShiftState(states["k"], states["v"], rows, states.get("q"))
    options: dict[str, Any] = {"seq_idx": documents, "state": state, "keep_state": False, "backend": backend}
    *results, _ = shift_norm_rope(by_chunk["q"], by_chunk["k"], by_chunk["v"], alpha, beta, gamma, **options)
    q_hat, k_hat, v_hat = (None if x is None else x.unflatten(0, (-1, chunks)).flatten(1, 2) for x in results)
    return q_hat, k_hat, v_hat  # type: ignore[return-value]


def exchange_halo(
    tensors: Sequence[Tensor],
    rows: int,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
) -> list[Tensor]:
    """Fetch the tokens before each chunk of this rank's shard from the ranks that hold them; differentiable.

        halo[:, n, i] = token  c[n] * C - rows + i  of the sequence, where c[n] is the n-th chunk of this rank

    Tokens before the first of the sequence are zeros. The halo ignores documents: its reader must use only the part
    that belongs to the document of the reading token.

    The ranks first compare their sizes, in one all-reduce of 16 bytes (on a GPU, the host does not wait for it). Tokens
    travel in one all-to-all, in which a rank with C >= rows sends only to the next rank in the contiguous layout, and
    to both neighbours in the head-tail layout; in backward, gradients travel the other way. With shorter chunks, tokens
    also come from more distant ranks.

    Every rank of the group must call this with tensors of the same shapes. If one rank differentiates the result, all
    must: a rank whose loss does not depend on its halo would otherwise block its neighbours.

    Args:
        tensors: the tensors to exchange together, (B, L, ...), of one dtype and device.
        rows: number of tokens before each chunk; W - 1 for a window of W.
        group: the processes that share each sequence, in the order of the layout. None for all processes.
        layout: "contiguous" or "headtail".

    Returns:
        The halo of each tensor, (B, N, rows, ...).

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype or shape; the message names it. If this is so on
            some ranks only, or if their arguments differ, every rank raises a ValueError that lists them.
        RuntimeError: the same, on a GPU and in compiled code: an assertion on the device fails.
    """
    if isinstance(tensors, Tensor):
        raise TypeError("tensors must be a sequence of tensors, such as [k, v], got a Tensor")
    return _exchange({f"tensors[{i}]": x for i, x in enumerate(tensors)}, rows, group, layout)


def _exchange(named: Mapping[str, Tensor], rows: int, group: dist.ProcessGroup | None, layout: Layout) -> list[Tensor]:
    """Do the work of `exchange_halo` for tensors by the names that errors give them."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    _check_together(named, rows, layout, group)
    tensors = [*named.values()]
    chunks, rank, size = _chunks_of_shard(layout), dist.get_rank(group), dist.get_world_size(group)
    leaving, arriving = _routes(rank, size, layout, tensors[0].shape[1] // chunks, rows)
    sent = [token for tokens in leaving for token in tokens]
    batch, features = tensors[0].shape[0], [x.shape[2:].numel() for x in tensors]
    picked = [torch.cat([x[:, :0], *(x[:, token : token + 1] for token in sent)], dim=1) for x in tensors]
    packed = [x.reshape(batch, len(sent), width) for x, width in zip(picked, features, strict=True)]
    received = all_to_all_single_autograd(
        torch.cat(packed, dim=2).transpose(0, 1).contiguous(),
        [len(places) for places in arriving],
        [len(tokens) for tokens in leaving],
        group or dist.group.WORLD,  # type: ignore[arg-type]
    )
    if received.requires_grad and not torch.compiler.is_compiling():
        received.register_hook(_refuse_second_derivative)

    # Even if nothing arrives, the result stays in the graph: backward must reach the exchange, for which others wait.
    found = torch.cat([received, received.new_zeros(1, *received.shape[1:])])
    index_of = {row: i for i, row in enumerate(place for places in arriving for place in places)}
    halo = torch.stack([found[index_of.get(row, -1)] for row in range(chunks * rows)], dim=1)
    parts = halo.unflatten(1, (chunks, rows)).split(features, dim=3)
    return [part.reshape(*part.shape[:3], *x.shape[2:]) for part, x in zip(parts, tensors, strict=True)]


def _check_together(
    named: Mapping[str, Any],
    rows: int | None,
    layout: str,
    group: dist.ProcessGroup | None,
    problem: Exception | None = None,
) -> None:
    """Raise an error on every rank if one has a problem, here or before, or if their arguments differ.

    Args:
        named: the tensors by the names of the arguments, which must be the same on every rank.
        rows, layout, group: as in `exchange_halo`; without `rows`, nothing is to be exchanged.
        problem: what this rank has found before.
    """
    code, tensors = -1, [*named.values()]
    try:
        if problem is None:
            _check_tensors(named, 1 if rows is None else rows, _chunks_of_shard(layout))
            sizes = [size for x in tensors for size in (x.ndim, *x.shape)]
            code = 0
            for number in (rows or 0, *f"{layout} {tensors[0].dtype} {[*named]}".encode(), *sizes):
                code = (code * 0x5DEECE66D + number) % (2**61 - 1)  # equal for other sizes: about once in 10^18
    except (TypeError, ValueError) as found:
        problem = found
    device = next((x.device for x in tensors if isinstance(x, Tensor)), None)
    largest = torch.tensor([code, -code], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group or dist.group.WORLD)
    if torch.compiler.is_compiling() or largest.device.type != "cpu":
        if problem is None:
            torch._assert_async(largest.sum() == 0, _DIFFER)  # type: ignore[attr-defined]
    elif largest.sum() != 0:
        what = "nothing shifted" if rows is None else f"window {rows + 1}"
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items() if isinstance(x, Tensor))
        mine = str(problem or f"{shapes} {tensors[0].dtype}, {what}, {layout}")
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        listed = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(everyone))
        raise ValueError(f"{_DIFFER}; {listed}") from problem
    if problem is not None:
        raise problem


def _chunks_of_rank(rank: int, size: int, layout: Layout) -> tuple[int, ...]:
    """Return the chunks that one of `size` ranks holds, in the order of its shard."""
    return (rank,) if layout == "contiguous" else (rank, 2 * size - 1 - rank)


def _routes(rank: int, size: int, layout: Layout, length: int, rows: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of its shard that a rank sends to each rank, and the rows of its halo that it gets from each.

    Args:
        length: C.
        rows: W - 1.
    """
    held = [_chunks_of_rank(holder, size, layout) for holder in range(size)]
    places = {chunk: (holder, i * length) for holder, chunks in enumerate(held) for i, chunk in enumerate(chunks)}
    leaving: list[list[int]] = [[] for _ in range(size)]
    arriving: list[list[int]] = [[] for _ in range(size)]
    for target, chunks in enumerate(held):
        needed = [chunk * length + behind for chunk in chunks for behind in range(-rows, 0)]
        for row, token in enumerate(needed):
            if token < 0:
                continue
            holder, start = places[token // length]
            if holder == rank:
                leaving[target].append(start + token % length)
            if target == rank:
                arriving[holder].append(row)
    return leaving, arriving


def _refuse_second_derivative(_: Tensor) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError("a halo has no second derivatives: leave out create_graph=True")


def _by_chunk(x: Tensor, chunks: int) -> Tensor:
    """Reshape (B, L, ...) to (B * N, C, ...)."""
    return x.unflatten(1, (chunks, -1)).flatten(0, 1)


def _chunks_of_shard(layout: str) -> int:
    """Return N, the number of chunks of a shard."""
    if layout not in ("contiguous", "headtail"):
        raise ValueError(f'layout must be "contiguous" or "headtail", got {layout!r}')
    return 1 if layout == "contiguous" else 2


def _check_tensors(named: Mapping[str, Tensor], rows: int, chunks: int) -> None:
    if not named:
        raise ValueError("tensors must hold at least one tensor, got none")
    first_name, first = next(iter(named.items()))
    for name, x in named.items():
        check_tensor(name, x, "(batch, tokens, ...)")
        if x.ndim < 2 or x.shape[:2] != first.shape[:2] or x.dtype != first.dtype or x.device != first.device:
            raise ValueError(
                f"{', '.join(named)} must be (batch, tokens, ...) with equal batch, length, dtype and device; "
                f"{first_name} is {tuple(first.shape)} {first.dtype} on {first.device}, {name} is {tuple(x.shape)} "
                f"{x.dtype} on {x.device}"
            )
    length = first.shape[1]
    if length == 0 or length % chunks:
        raise ValueError(f"a shard must have a multiple of {chunks} tokens, and at least {chunks}; got {length}")
    if rows < 1:
        raise ValueError(f"rows must be at least 1 (window - 1), got {rows}")


def _check_positions(positions: Tensor, k: Tensor) -> None:
    check_tensor("positions", positions, "(batch, tokens)")
    batch, length = k.shape[:2]
    if positions.ndim != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != length:
        raise ValueError(f"positions must be ({batch}, {length}) or (1, {length}), got {tuple(positions.shape)}")
    if positions.is_floating_point() or positions.dtype == torch.bool or positions.device != k.device:
        raise ValueError(f"positions must be integers on {k.device}, got {positions.dtype} on {positions.device}")
