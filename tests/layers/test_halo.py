"""KV shift of sequences sharded over processes; `halo_worker.py` has the checks that need several processes."""

from __future__ import annotations

import pytest
import torch

from kvshift import kv_shift
from kvshift.layers import halo
from kvshift.layers.halo import _routes, exchange_halo, shift_shard

from ..worker_processes import fork_workers
from . import halo_worker
from .halo_worker import G, shard_tokens


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_shards_equal_one_process(processes: int, tmp_path):
    outputs = fork_workers(processes, halo_worker.main, str(tmp_path / "rendezvous"), timeout=600)
    assert all(output.splitlines()[-1] == "passed" for output in outputs), "\n".join(outputs)


@pytest.mark.parametrize("layout", ["contiguous", "headtail"])
@pytest.mark.parametrize(("size", "length", "rows"), [(1, 2, 1), (2, 1, 3), (3, 2, 2), (4, 5, 3), (5, 1, 1)])
def test_every_token_has_one_way(layout, size: int, length: int, rows: int):
    """The routes deliver to each row of each halo the token at that position of the sequence, exactly once."""
    held = [shard_tokens(layout, length, rank, size).tolist() for rank in range(size)]
    routes = [_routes(rank, size, layout, length, rows) for rank in range(size)]
    for target in range(size):
        starts = held[target][::length]
        expected = {
            number * rows + row: start - rows + row
            for number, start in enumerate(starts)
            for row in range(rows)
            if start - rows + row >= 0
        }
        found = [
            (row, held[source][token])
            for source, (leaving, _) in enumerate(routes)
            for token, row in zip(leaving[target], routes[target][1][source], strict=True)
        ]
        assert len(found) == len(expected)
        assert dict(found) == expected


@pytest.mark.parametrize("layout", ["contiguous", "headtail"])
def test_one_process_has_the_whole_sequence(alone, layout):
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    k, v = torch.randn(2, 8, G, 3), torch.randn(2, 8, G, 5)
    mix = torch.randn(G, 3)
    q_hat, k_hat, v_hat = shift_shard(k, v, mix, mix, positions=positions, layout=layout)
    expected = kv_shift(k, v, mix, mix, seq_idx=(positions == 0).cumsum(1).expand(2, -1))
    assert q_hat is None
    assert torch.equal(k_hat, expected[0])
    assert torch.equal(v_hat, expected[1])


def test_a_halo_may_have_any_features(alone):
    x, y = torch.randn(2, 6), torch.randn(2, 6, 3, 1, 2)
    halo_x, halo_y = exchange_halo([x, y], 2, layout="headtail")
    assert halo_x.shape == (2, 2, 2)
    assert halo_y.shape == (2, 2, 2, 3, 1, 2)
    assert torch.equal(halo_x[:, 1], x[:, 1:3])
    assert torch.equal(halo_y[:, 1], y[:, 1:3])
    assert not halo_x[:, 0].any()


def test_what_is_not_shifted_is_not_fetched(alone, monkeypatch):
    fetched = []

    def record(named, *where):
        fetched.append([x.shape[-1] for x in named.values()])
        return exchange(named, *where)

    exchange = halo._exchange
    monkeypatch.setattr(halo, "_exchange", record)
    q, k, v = torch.randn(1, 4, 2 * G, 3), torch.randn(1, 4, G, 3), torch.randn(1, 4, G, 5)
    mix = torch.randn(G, 2)
    q_hat, k_hat, v_hat = shift_shard(k, v, None, mix, q=q)
    assert torch.equal(q_hat, q)
    assert torch.equal(k_hat, k)
    assert not torch.equal(v_hat, v)
    assert fetched == [[5]]
    assert shift_shard(k, v, None, None, q=q) == (q, k, v)
    assert fetched == [[5]]


K, MIX = torch.zeros(2, 4, G, 3), torch.zeros(G, 2)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"layout": "ptrr"}, ValueError, 'layout must be "contiguous" or "headtail", got \'ptrr\''),
        ({"layout": None}, ValueError, 'layout must be "contiguous" or "headtail", got None'),
        ({"k": K[:, :3], "v": K[:, :3], "layout": "headtail"}, ValueError, "multiple of 2 tokens, .* 2; got 3"),
        ({"k": K[:, :0], "v": K[:, :0]}, ValueError, "multiple of 1 tokens, and at least 1; got 0"),
        ({"v": K[:1]}, ValueError, r"v must have the batch and length of k, \(2, 4\), got \(1, 4\)"),
        ({"q": K[:, :3]}, ValueError, r"q must have the batch and length of k, \(2, 4\), got \(2, 3\)"),
        ({"backend": "cuda"}, ValueError, "backend must be one of 'auto', .*; got 'cuda'"),
        (
            {"v": K.double()},
            ValueError,
            r"k, v must be .* equal batch, length, dtype and device; k is \(2, 4, 2, 3\) torch.float32",
        ),
        ({"k": K[0]}, ValueError, "k must have 4 dimensions"),
        ({"k": [1.0]}, TypeError, r"k must be a tensor \(batch, positions, heads, head size\), got list"),
        ({"alpha": MIX[:1]}, ValueError, r"alpha must be \(heads, window\) with 2 heads"),
        ({"alpha": torch.zeros(G, 3)}, ValueError, r"alpha, beta and gamma must have the same window, got \[2, 3\]"),
        ({"gamma": MIX}, TypeError, "q must be a tensor .*, got NoneType"),
        ({"positions": torch.zeros(4).long()}, ValueError, r"positions must be \(2, 4\) or \(1, 4\), got \(4,\)"),
        ({"positions": torch.zeros(2, 8).long()}, ValueError, r"positions must be \(2, 4\) or \(1, 4\)"),
        ({"positions": torch.zeros(2, 4)}, ValueError, "positions must be integers on cpu, got torch.float32 on cpu"),
        ({"positions": [[0, 1, 2, 3]]}, TypeError, "positions must be a tensor"),
    ],
)
def test_errors_name_the_argument(alone, changed: dict, error: type, message: str):
    arguments = {"k": K, "v": K, "alpha": MIX, "beta": MIX} | changed
    with pytest.raises(error, match=message):
        shift_shard(**arguments)


@pytest.mark.parametrize(
    ("tensors", "rows", "error", "message"),
    [
        ([K], 0, ValueError, "rows must be at least 1"),
        ([], 1, ValueError, "tensors must hold at least one tensor, got none"),
        ([K, None], 1, TypeError, r"tensors\[1\] must be a tensor"),
        (K, 1, TypeError, r"tensors must be a sequence of tensors, such as \[k, v\], got a Tensor"),
        ([K[:, 0, 0, 0]], 1, ValueError, r"tensors\[0\] must be"),
    ],
)
def test_errors_of_the_exchange(alone, tensors, rows: int, error: type, message: str):
    with pytest.raises(error, match=message):
        exchange_halo(tensors, rows)


def test_processes_are_needed():
    with pytest.raises(ValueError, match="process group has not been initialized"):
        shift_shard(K, K, MIX, MIX)
