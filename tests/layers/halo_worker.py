"""The program of one of the processes that share sequences in `test_halo.py`."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint

from kvshift.layers import halo
from kvshift.layers.halo import exchange_halo, shift_shard
from kvshift.ops import shift_tokens

G, H, D, DV = 2, 3, 3, 5
LAYOUTS = ("contiguous", "headtail")
EXACT = 1e-10


def document_rows(chunk: int, chunks: int) -> list[list[int]]:
    """Return the document lengths of each row: boundaries before, on and after chunk edges, documents of length 1."""
    length, middle = chunk * chunks, chunk * (chunks // 2)
    rows = [
        [length],
        [1] * length,
        [chunk] * chunks,
        [chunk, length - chunk],
        [chunk - 1, length - chunk + 1],
        [chunk + 1, length - chunk - 1],
        [chunk - 1, 1, length - chunk],
        [chunk, 1, length - chunk - 1],
        [chunk - 1, 1, 1, length - chunk - 1],
        [middle - 1, 2, length - middle - 1],
        [length - chunk - 2, 3, chunk - 1],
        [length - 1, 1],
    ]
    return [row for row in rows if min(row) > 0]


def shard_tokens(layout: str, chunk: int, rank: int, size: int) -> Tensor:
    """Return the tokens of a sequence that a rank holds, in the order of its shard."""
    held = [rank] if layout == "contiguous" else [rank, 2 * size - 1 - rank]
    return torch.cat([torch.arange(chunk * number, chunk * (number + 1)) for number in held])


@dataclass(frozen=True)
class Case:
    """Options of a test: layout and size of the shards, the shift, and the process group."""

    layout: str
    window: int = 2
    chunk: int = 5
    targets: str = "kv"
    documents: bool = True
    dtype: torch.dtype = torch.float64
    group: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def chunks(self) -> int:
        return (1 if self.layout == "contiguous" else 2) * dist.get_world_size(self.group)

    def mine(self, x: Tensor) -> Tensor:
        tokens = shard_tokens(self.layout, self.chunk, dist.get_rank(self.group), dist.get_world_size(self.group))
        return x[:, tokens].detach().clone()


@dataclass
class Sequences:
    """Whole sequences, the same on every rank, with coefficients and a weight for each output, in the case's dtype."""

    case: Case

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(7)
        rows = document_rows(self.case.chunk, self.case.chunks)
        batch, length = len(rows), self.case.chunk * self.case.chunks

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64).to(self.case.dtype)

        sizes = {"q": (H, D), "k": (G, D), "v": (G, DV)}
        self.tokens = {name: draw(batch, length, *size) for name, size in sizes.items()}
        self.loss_weight = {name: draw(batch, length, *size) for name, size in sizes.items()}
        self.coefficients = {name: draw(sizes[name][0], self.case.window) for name in self.case.targets}
        whole = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
        self.positions = whole if self.case.documents else torch.arange(length).expand(batch, -1)

    def results(self, shift: Callable[..., dict[str, Tensor]], mine: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the outputs of `shift(tokens, coefficients, positions)`, and gradients of tokens and coefficients."""
        tokens = {name: mine(x).requires_grad_() for name, x in self.tokens.items()}
        coefficients = {name: x.detach().clone().requires_grad_() for name, x in self.coefficients.items()}
        out = shift(tokens, coefficients, mine(self.positions))
        sum((out[name] * mine(self.loss_weight[name])).sum() for name in out).backward()
        gradients = {f"gradient of {name}": x.grad for name, x in tokens.items()}
        gradients |= {f"gradient of {name}'s coefficients": x.grad for name, x in coefficients.items()}
        return {name: x.detach() for name, x in out.items()} | gradients


def one_process(tokens: dict[str, Tensor], coefficients: dict[str, Tensor], positions: Tensor) -> dict[str, Tensor]:
    documents = (positions == 0).cumsum(1)
    return tokens | {name: shift_tokens(tokens[name], mix, seq_idx=documents)[0] for name, mix in coefficients.items()}


def sharded(case: Case, shift: Callable[..., Any] = shift_shard, **changed: Any) -> Callable[..., dict[str, Tensor]]:
    def call(tokens: dict[str, Tensor], coefficients: dict[str, Tensor], positions: Tensor) -> dict[str, Tensor]:
        alpha, beta, gamma = (coefficients.get(name) for name in ("k", "v", "q"))
        where: dict[str, Any] = {"positions": positions if case.documents else None, "layout": case.layout}
        where |= {"group": case.group, "q": tokens["q"], "gamma": gamma} | changed
        q, k, v = shift(tokens["k"], tokens["v"], alpha, beta, **where)
        return {"q": q, "k": k, "v": v}

    return call


def differences(case: Case, shift: Callable[..., dict[str, Tensor]] | None = None) -> dict[str, float]:
    """Return the largest difference on any rank between shards and one process, for each output and gradient."""
    sequences = Sequences(case)
    expected = sequences.results(one_process, lambda x: x.detach().clone())
    got = sequences.results(shift or sharded(case), case.mine)
    largest = {}
    for name, value in got.items():
        if name.endswith("coefficients"):
            dist.all_reduce(value, group=case.group)
        else:
            expected[name] = case.mine(expected[name])
        largest[name] = (value - expected[name]).abs().max()
    values = torch.stack([*largest.values()])
    dist.all_reduce(values, dist.ReduceOp.MAX, group=case.group)
    return dict(zip(largest, values.tolist(), strict=True))


def assert_equal(case: Case, shift: Callable[..., dict[str, Tensor]] | None = None) -> None:
    found = differences(case, shift)
    assert len(found) == 6 + len(case.targets)
    assert max(found.values()) < EXACT, f"{case}: {found}"


# Properties that must hold --------------------------------------------------------------------------------------------


def every_layout_window_length_and_target() -> None:
    cases = [Case(*case) for case in itertools.product(LAYOUTS, (2, 3, 4), (1, 2, 3, 5))]
    cases += [Case(layout, 3, 4, targets) for layout in LAYOUTS for targets in ("k", "v", "q", "qkv")]
    cases += [Case(layout, 3, 2, documents=False) for layout in LAYOUTS]
    for case in cases:
        assert_equal(case)


def the_bits_are_those_of_one_process() -> None:
    for layout, dtype in itertools.product(LAYOUTS, (torch.float32, torch.bfloat16)):
        case = Case(layout, 3, 4, dtype=dtype)
        whole = Sequences(case)
        expected = one_process(whole.tokens, whole.coefficients, whole.positions)
        shards = {name: case.mine(x) for name, x in whole.tokens.items()}
        got = sharded(case)(shards, whole.coefficients, case.mine(whole.positions))
        assert all(torch.equal(got[name], case.mine(expected[name])) for name in got)


def recomputed_in_backward() -> None:
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(shift_shard, *args, use_reentrant=False, **kwargs)

    for layout in LAYOUTS:
        case = Case(layout, 3, 3)
        assert_equal(case, sharded(case, again))


def compiled() -> None:
    """Compile the whole shift on two processes; on more, only the exchange, which depends on their number."""
    if dist.get_world_size() == 2:
        for case in (Case("contiguous", 2, 5), Case("headtail", 4, 2, "qkv")):
            torch._dynamo.reset()
            assert_equal(case, sharded(case, torch.compile(shift_shard, backend="aot_eager", fullgraph=True)))
    rng = torch.Generator().manual_seed(dist.get_rank())
    for layout, rows, chunk in (("contiguous", 1, 5), ("headtail", 2, 5), ("headtail", 3, 2)):
        torch._dynamo.reset()
        length = chunk * (1 if layout == "contiguous" else 2)
        x = torch.randn(2, length, G, D, generator=rng, dtype=torch.float64).requires_grad_()
        y = torch.randn(2, length, H, DV, generator=rng, dtype=torch.float64).requires_grad_()
        found = []
        for exchange in (exchange_halo, torch.compile(exchange_halo, backend="aot_eager", fullgraph=True)):
            halos = exchange([x, y], rows, layout=layout)
            found.append([*halos, *torch.autograd.grad(sum((halo**2).sum() for halo in halos), (x, y))])
        for eager, traced in zip(*found, strict=True):
            torch.testing.assert_close(traced, eager, rtol=0, atol=EXACT)
        assert dist.get_rank() == 0 or found[0][0].count_nonzero() > 0


def groups_within_the_world() -> None:
    """Ranks 0 and 2 share some sequences, ranks 1 and 3 others."""
    if dist.get_world_size() < 4:
        return
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for layout in LAYOUTS:
        assert_equal(Case(layout, 3, 4, group=groups[dist.get_rank() % 2]))


def only_neighbours_exchange() -> None:
    """Only W - 1 tokens are sent to each neighbour that needs them; k, v and q are sent together."""
    rank, size, stock = dist.get_rank(), dist.get_world_size(), functional.all_to_all_single_autograd
    for layout in LAYOUTS:
        case, exchanged = Case(layout, 3, 4, "qkv"), []

        def record(sent: Tensor, received_sizes: list, sent_sizes: list, group: Any, found: list = exchanged) -> Tensor:
            found.append((tuple(sent.shape), received_sizes, sent_sizes))
            return stock(sent, received_sizes, sent_sizes, group)

        sequences = Sequences(case)
        with patch.object(functional, "all_to_all_single_autograd", record):
            sequences.results(sharded(case), case.mine)
        before, after = rank - 1, rank + 1
        sources, targets = ({before}, {after}) if layout == "contiguous" else ({before, after}, {before, after})
        own = {rank} if layout == "headtail" and rank == size - 1 else set()  # the two middle chunks of the sequence
        received, sent = ([2 * (peer in peers | own) for peer in range(size)] for peers in (sources, targets))
        shape = (sum(sent), sequences.positions.shape[0], H * D + G * D + G * DV)
        assert exchanged == [(shape, received, sent)], f"{layout}, rank {rank}: {exchanged}"


def ranks_that_differ_are_refused_together() -> None:
    """If the last rank differs in anything, every rank raises the same error, and nothing is left in flight."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    k, mix = torch.zeros(2, 4, G, D), torch.zeros(G, 6)
    good: dict[str, Any] = {"k": k, "v": k, "alpha": mix, "beta": mix}
    three_heads = {"alpha": mix[:1].expand(3, 6), "beta": mix[:1].expand(3, 6)}
    swapped = {"k": k.mT.contiguous(), "v": k.mT.contiguous()} | three_heads  # as many numbers for each token
    cases: list[tuple[dict[str, Any], str]] = [
        ({"k": k[:, :3], "v": k[:, :3]}, "k (2, 3, 2, 3), v (2, 3, 2, 3) torch.float32, window 6, contiguous"),
        ({"k": k.repeat(1, 2, 1, 1), "v": k.repeat(1, 2, 1, 1)}, "(2, 8, 2, 3)"),
        ({"k": k[:, :0], "v": k[:, :0]}, "at least 1; got 0"),
        ({"k": k[:1], "v": k[:1]}, "(1, 4, 2, 3)"),
        (swapped, "(2, 4, 3, 2)"),
        ({"k": k.bfloat16(), "v": k.bfloat16()}, "torch.bfloat16"),
        ({"v": k.double()}, "equal batch, length, dtype and device"),
        ({"alpha": mix[:, :2], "beta": mix[:, :2]}, "window 2"),
        ({"alpha": mix[:, :2]}, "must have the same window, got [2, 6]"),
        ({"alpha": None}, "v (2, 4, 2, 3) torch.float32"),
        ({"alpha": None, "beta": None}, "nothing shifted, contiguous"),
        ({"q": k, "gamma": mix}, "q (2, 4, 2, 3), k (2, 4, 2, 3), v (2, 4, 2, 3)"),
        ({"layout": "headtail"}, "headtail"),
        ({"layout": "ptrr"}, "got 'ptrr'"),
        ({"k": None}, "k must be a tensor"),
        ({"backend": "cuda"}, "backend must be one of 'auto', "),
        ({"q": k[:, :3]}, "q must have the batch and length of k, (2, 4), got (2, 3)"),
        ({"positions": torch.zeros(2, 3, dtype=torch.long)}, "positions must be (2, 4) or (1, 4), got (2, 3)"),
    ]
    for changed, message in cases:
        with pytest.raises(ValueError, match="on every rank of the group; rank 0: ") as refused:
            shift_shard(**good | (changed if rank == last else {}))
        assert message in str(refused.value).partition(f"rank {last}: ")[2], refused.value
        everyone: list[Any] = [None] * (last + 1)
        dist.all_gather_object(everyone, str(refused.value))
        assert len(set(everyone)) == 1, everyone
    with pytest.raises(ValueError, match="on every rank of the group; rank 0: "):  # of equal shapes
        shift_shard(**good | {"alpha" if rank == last else "beta": None})
    with pytest.raises(TypeError, match="k must be a tensor"):  # a problem of all ranks is that of one process
        shift_shard(**good | {"k": None})
    unequal = good | ({"k": k[:, :3], "v": k[:, :3]} if rank == last else {})
    with pytest.raises(RuntimeError, match="on every rank of the group"):
        torch.compile(shift_shard, backend="aot_eager", fullgraph=True)(**unequal)
    assert_equal(Case("headtail", 6, 3))


def a_second_derivative_is_refused() -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    (halo_of_x,) = exchange_halo([x], 1, layout="headtail")
    with pytest.raises(NotImplementedError, match="a halo has no second derivatives"):
        torch.autograd.grad((halo_of_x**2).sum(), x, create_graph=True)


# Faults that must be detected -----------------------------------------------------------------------------------------


def every_sabotage_is_caught() -> None:
    held_chunks, exchange = halo._chunks_of_rank, halo._exchange

    def dropped(*args: Any, **kwargs: Any) -> list[Tensor]:
        return [torch.zeros_like(x) for x in exchange(*args, **kwargs)]

    def not_differentiated(*args: Any, **kwargs: Any) -> list[Tensor]:
        return [x.detach() for x in exchange(*args, **kwargs)]

    def mirrored(rank: int, size: int, layout: Any) -> tuple[int, ...]:
        return held_chunks(size - 1 - rank, size, layout)

    for layout in LAYOUTS:
        other = {"contiguous": "headtail", "headtail": "contiguous"}[layout]
        sabotage: dict[str, tuple[AbstractContextManager[Any], dict[str, Any]]] = {
            "nothing": (nullcontext(), {}),
            "dropped": (patch.object(halo, "_exchange", dropped), {}),
            "wrong neighbour": (patch.object(halo, "_chunks_of_rank", mirrored), {}),
            "wrong layout": (nullcontext(), {"layout": other}),
            "not differentiated": (patch.object(halo, "_exchange", not_differentiated), {}),
            "documents ignored": (nullcontext(), {"positions": None}),
        }
        for window in (2, 3):
            case = Case(layout, window, 4)
            for name, (broken, changed) in sabotage.items():
                with broken:
                    found = differences(case, sharded(case, **changed))
                gradients = max(value for key, value in found.items() if key.startswith("gradient"))
                outputs = max(value for key, value in found.items() if not key.startswith("gradient"))
                assert (gradients > 0.1) == (name != "nothing"), f"{case}, {name}: {found}"
                assert (outputs > 0.1) == (name not in ("nothing", "not differentiated")), f"{case}, {name}: {found}"


def main(rendezvous: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=180),
    )
    for check in (
        every_layout_window_length_and_target,
        the_bits_are_those_of_one_process,
        recomputed_in_backward,
        groups_within_the_world,
        only_neighbours_exchange,
        ranks_that_differ_are_refused_together,
        a_second_derivative_is_refused,
        every_sabotage_is_caught,
        compiled,
    ):
        check()
        print(f"passed: {check.__name__}", flush=True)
    dist.barrier()
    print("passed", flush=True)
