"""KV shift where every sequence is divided among processes (context parallelism): the tokens before a shard.

The first W - 1 tokens of a chunk are mixed with tokens that are in another process. `exchange_halo` fetches these, and
`shift_shard` shifts a shard with them. How the C-token chunks of a sequence are divided among R ranks is its layout:

    "contiguous"    rank r holds chunk r of R
    "headtail"      rank r holds chunks r and 2R-1-r of 2R, side by side, so that causal attention costs all ranks alike

Shapes: B batch, L tokens of a shard, N chunks of a shard, C = L / N, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.shift import check_coefficients, check_input, check_tensor
from kvshift.ops.state import ShiftState

Layout = Literal["contiguous", "headtail"]


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
    """Shift this rank's part of every sequence: what `kvshift.kv_shift` gives for its tokens in the whole sequence.

        k_hat[t] = alpha[:, 0] * k[t] + alpha[:, 1] * k[t-1] + ... + alpha[:, W-1] * k[t-W+1]

    v with beta and q with gamma likewise. Lag j is read exactly where positions[t] >= j; the result has the same bits
    as in one process. Every rank of the group must call this, and must differentiate what it returns if one does:
    the gradients of the tokens that were fetched travel back to the rank that holds them. The gradients of the
    coefficients are those of this shard, to be summed over the group as those of any other weight.

    What is fetched travels together (`exchange_halo`).

    Args:
        k: raw keys, after projection and before QK-norm and rotary embedding, (B, L, G, Dk).
        v: raw values, (B, L, G, Dv).
        alpha, beta: coefficients, (G, W); None: not shifted. `KVShift.coefficients()` has those of a layer.
        q, gamma: raw queries, (B, L, H, Dk), and their coefficients, (H, W), where queries are shifted too.
        positions: of the tokens of this shard in their documents, (B, L) or (1, L) integers; every document counts
            from 0. None: each row of the batch is one document.
        group, layout: as in `exchange_halo`.
        backend: as in `kv_shift`.

    Returns:
        q (as it came where it is not shifted), k_hat and v_hat.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype or shape; the message names it.

    Source:
        Equation 5 of the paper, for sharded sequences.
    """
    shifted: dict[str, Tensor] = {}
    windows = set()
    for name, x, letter, mix in (("q", q, "gamma", gamma), ("k", k, "alpha", alpha), ("v", v, "beta", beta)):
        if mix is not None:
            check_input(name, x)  # type: ignore[arg-type]  # no queries: a TypeError that says so
            check_coefficients(letter, mix, x)  # type: ignore[arg-type]
            shifted[name] = x  # type: ignore[assignment]
            windows.add(mix.shape[1])
    if not shifted:
        return q, k, v
    if len(windows) > 1:
        raise ValueError(f"alpha, beta and gamma must have the same window, got {sorted(windows)}")
    chunks, rows = _chunks_of_shard(layout), windows.pop() - 1
    documents = same_document = None
    if positions is not None:
        _check_positions(positions, k)
        positions = _by_chunk(positions.expand(k.shape[0], -1), chunks)
        documents = (positions == 0).cumsum(1)
        lags = torch.arange(rows, 0, -1, device=k.device)  # of the rows of a halo, seen from the chunk's first token
        same_document = (positions[:, :1] >= lags)[..., None, None]
    halos = exchange_halo([*shifted.values()], rows, group=group, layout=layout)
    halo = dict(zip(shifted, halos, strict=True))

    def state(name: str, x: Tensor) -> Tensor:
        if name not in halo:
            return x.new_zeros(x.shape[0] * chunks, rows, *x.shape[2:])
        before = halo[name].flatten(0, 1)
        return before if same_document is None else torch.where(same_document, before, 0)

    states = ShiftState(state("k", k), state("v", v), rows, None if gamma is None or q is None else state("q", q))
    by_chunk: Any = [None if x is None else _by_chunk(x, chunks) for x in (q, k, v)]
    where: dict[str, Any] = {"state": states, "seq_idx": documents, "keep_state": False, "backend": backend}
    shifts: Any = shift_norm_rope(by_chunk[0], by_chunk[1], by_chunk[2], alpha, beta, gamma, **where)
    q_hat, k_hat, v_hat = (None if x is None else x.unflatten(0, (-1, chunks)).flatten(1, 2) for x in shifts[:3])
    return q_hat, k_hat, v_hat  # type: ignore[return-value]


def exchange_halo(
    tensors: Sequence[Tensor],
    rows: int,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
) -> list[Tensor]:
    """The tokens that stand before each chunk of this rank's shard, from the ranks that hold them; differentiable.

        halo[:, n, i] = token  c[n] * C - rows + i  of the sequence, where c[n] is the n-th chunk of this rank

    Before the first token of the sequence stand zeros. Documents do not matter here: whoever reads a halo, reads only
    as much of it as belongs to the document of the reading token.

    With C >= rows, a rank sends one message in the contiguous layout, to the next rank, and two in the head-tail
    layout, one to each neighbour; in backward, the gradients travel the other way. With shorter chunks, messages come
    from ranks further away too. Eager code sends point to point; under torch.compile it is one all-to-all, which can be
    traced.

    Every rank of the group must call this with tensors of the same shapes. If one rank differentiates the result, all
    must: a rank whose loss does not depend on its halo would keep its neighbours waiting.

    Args:
        tensors: those that travel together, (B, L, ...), of one dtype and device.
        rows: how many tokens; W - 1 for a window of W.
        group: the processes that share each sequence, in the order of the layout; None: all.
        layout: "contiguous" or "headtail".

    Returns:
        The halo of each tensor, (B, N, rows, ...).

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype or shape; the message names it.
    """
    chunks = _chunks_of_shard(layout)
    length = _check_tensors(tensors, chunks)
    if rows < 1:
        raise ValueError(f"rows must be at least 1 (the window less one), got {rows}")
    rank, division = dist.get_rank(group), _Division(layout, dist.get_world_size(group), length // chunks, rows)
    peers = division.peers(rank)
    outgoing = {peer: division.routes(rank, peer) for peer in peers}
    incoming = {peer: division.routes(peer, rank) for peer in peers}
    within = division.routes(rank, rank)
    features = [x.shape[2:].numel() for x in tensors]

    def pack(routes: Sequence[_Route]) -> Tensor:
        """The tokens of these routes with all features of all tensors, (tokens, B, F)."""
        stacked = [
            torch.stack([x[:, r.token] for r in routes]) if routes else x[:, :0].transpose(0, 1) for x in tensors
        ]
        shapes = [(len(routes), x.shape[0], width) for x, width in zip(tensors, features, strict=True)]
        return torch.cat([x.reshape(shape) for x, shape in zip(stacked, shapes, strict=True)], dim=2)

    received = _exchange(
        pack([route for routes in outgoing.values() for route in routes]),
        {peer: len(routes) for peer, routes in outgoing.items()},
        {peer: len(routes) for peer, routes in incoming.items()},
        group,
    )
    arrived = [route for routes in incoming.values() for route in routes]
    # Where nothing arrives, a sum over nothing: backward must come to the exchange all the same, as others wait for it.
    zero = torch.zeros_like(received[0]) if arrived else received.sum(0)
    halo = [zero] * (chunks * rows)
    for route, token in (
        *zip(arrived, received.unbind(0), strict=True),
        *zip(within, pack(within).unbind(0), strict=True),
    ):
        halo[route.row] = token
    parts = torch.stack(halo, dim=1).unflatten(1, (chunks, rows)).split(features, dim=3)
    return [part.reshape(*part.shape[:3], *x.shape[2:]) for part, x in zip(parts, tensors, strict=True)]


class _Route(NamedTuple):
    """A token on its way: its index in the shard that holds it, and the row of the halo where it is read."""

    token: int
    row: int


class _Division(NamedTuple):
    """Which rank holds which tokens, and who needs them.

    Attributes:
        layout: see the head of the module.
        size: R, the number of ranks.
        length: C.
        rows: W - 1.
    """

    layout: Layout
    size: int
    length: int
    rows: int

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks that a rank holds, in their order in its shard."""
        return (rank,) if self.layout == "contiguous" else (rank, 2 * self.size - 1 - rank)

    def peers(self, rank: int) -> list[int]:
        """The other ranks with which this one may exchange tokens."""
        reach = -(-self.rows // self.length)
        near = {chunk + step for chunk in self.chunks(rank) for step in range(-reach, reach + 1)}
        return [peer for peer in range(self.size) if peer != rank and not near.isdisjoint(self.chunks(peer))]

    def routes(self, source: int, target: int) -> list[_Route]:
        """The tokens that `target` needs of `source`, in the order of their rows."""
        held, routes = self.chunks(source), []
        for row in range(len(held) * self.rows):
            number, behind = divmod(row, self.rows)
            token = self.chunks(target)[number] * self.length - self.rows + behind
            if token >= 0 and token // self.length in held:
                index = held.index(token // self.length) * self.length + token % self.length
                routes.append(_Route(index, row))
        return routes


def _exchange(
    sent: Tensor, outgoing: dict[int, int], incoming: dict[int, int], group: dist.ProcessGroup | None
) -> Tensor:
    """Send tokens and receive others, sorted by rank.

    Args:
        sent: (tokens, B, F), those for each rank of `outgoing` one after another.
        outgoing, incoming: how many tokens go to a rank or come from it.

    Returns:
        (tokens, B, F), those of each rank of `incoming` one after another.
    """
    if not torch.compiler.is_compiling():
        return _PointToPoint.apply(sent, outgoing, incoming, group)
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    ranks = range(dist.get_world_size(group))
    received, sizes = ([counts.get(rank, 0) for rank in ranks] for counts in (incoming, outgoing))
    return all_to_all_single_autograd(sent, received, sizes, group or dist.group.WORLD)  # type: ignore[arg-type]


class _PointToPoint(torch.autograd.Function):
    """`_exchange` by a message for each rank that gets tokens."""

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, outgoing: dict[int, int], incoming: dict[int, int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.outgoing, ctx.incoming, ctx.group = outgoing, incoming, group
        return _send_and_receive(sent, outgoing, incoming, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise NotImplementedError("a halo has no second derivatives: leave out create_graph=True")
        return _send_and_receive(gradient.contiguous(), ctx.incoming, ctx.outgoing, ctx.group), None, None, None


def _send_and_receive(
    sent: Tensor, outgoing: dict[int, int], incoming: dict[int, int], group: dist.ProcessGroup | None
) -> Tensor:
    received = sent.new_empty(sum(incoming.values()), *sent.shape[1:])
    messages = []
    for operation, tokens, counts in ((dist.isend, sent, outgoing), (dist.irecv, received, incoming)):
        for peer, part in zip(counts, tokens.split(list(counts.values())), strict=True):
            if len(part) > 0:
                messages.append(dist.P2POp(operation, part, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    return received


def _by_chunk(x: Tensor, chunks: int) -> Tensor:
    """(B, L, ...) as (B * N, C, ...)."""
    return x.unflatten(1, (chunks, -1)).flatten(0, 1)


def _chunks_of_shard(layout: str) -> int:
    """N, the chunks of a shard."""
    if layout not in ("contiguous", "headtail"):
        raise ValueError(f'layout must be "contiguous" or "headtail", got {layout!r}')
    return 1 if layout == "contiguous" else 2


def _check_tensors(tensors: Sequence[Tensor], chunks: int) -> int:
    """Returns L."""
    if not tensors:
        raise ValueError("tensors must hold at least one tensor, got none")
    first = tensors[0]
    for i, x in enumerate(tensors):
        check_tensor(f"tensors[{i}]", x, "(batch, tokens, ...)")
        if x.ndim < 2 or x.shape[:2] != first.shape[:2] or x.dtype != first.dtype or x.device != first.device:
            raise ValueError(
                f"tensors must be (batch, tokens, ...) of one batch, length, dtype and device; tensors[0] is "
                f"{tuple(first.shape)} {first.dtype} on {first.device}, tensors[{i}] is {tuple(x.shape)} {x.dtype} "
                f"on {x.device}"
            )
    length = first.shape[1]
    if length == 0 or length % chunks:
        raise ValueError(f"a shard must have a multiple of {chunks} tokens, and at least {chunks}; got {length}")
    return length


def _check_positions(positions: Tensor, k: Tensor) -> None:
    check_tensor("positions", positions, "(batch, tokens)")
    batch, length = k.shape[:2]
    if positions.ndim != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != length:
        raise ValueError(f"positions must be ({batch}, {length}) or (1, {length}), got {tuple(positions.shape)}")
    if positions.is_floating_point() or positions.dtype == torch.bool or positions.device != k.device:
        raise ValueError(f"positions must be integers on {k.device}, got {positions.dtype} on {positions.device}")
