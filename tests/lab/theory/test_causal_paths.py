"""Property 1, about the layers of this package."""

import pytest
import torch

from kvshift import KVShiftAttention, ShiftOptions
from kvshift.lab.core.seeds import generator_for
from kvshift.lab.theory.causal_paths import path_weights

pytestmark = pytest.mark.no_models

N = 7


def token_map(shift_targets, seed):
    """M with out = M x, read off a layer with random queries and keys: attention is linear in its values."""
    generator = generator_for("test paths", seed)
    layer = KVShiftAttention(N, 1, shift_options=ShiftOptions(targets=shift_targets), position_encoding="none").double()
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight.normal_(generator=generator)
        for projection in (layer.v_proj, layer.o_proj):
            projection.weight.copy_(torch.eye(N))
        layer.shift.reset_parameters(generator)
        tokens, _ = torch.linalg.qr(torch.randn(N, N, generator=generator, dtype=torch.float64))
        matrix = layer(tokens.unsqueeze(0))[0].squeeze(0) @ tokens.T  # x x^T = I
    assert matrix.triu(1).abs().max() < 1e-14
    return matrix.tril()


@pytest.mark.parametrize("shift_targets", [(), ("k", "v")])
@pytest.mark.parametrize(("query", "source"), [(5, 2), (6, 0), (3, 3), (2, 5)])
def test_nothing_reaches_a_query_through_tokens_before_the_source(shift_targets, query, source):
    second, first = token_map(shift_targets, 0), token_map(shift_targets, 1)
    paths = path_weights(second, first, query, source)
    assert torch.equal(paths != 0, (torch.arange(N) >= source) & (torch.arange(N) <= query))
    assert paths.sum().item() == pytest.approx((second @ first)[query, source].item(), abs=1e-15)


def test_paths_worked_by_hand():
    second = torch.tensor([[1.0, 0, 0], [2, 3, 0], [5, 7, 11]])
    first = torch.tensor([[13.0, 0, 0], [17, 19, 0], [23, 29, 31]])
    assert path_weights(second, first, query=2, source=1).tolist() == [0, 7 * 19, 11 * 29]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": torch.ones(3, 3)}, r"first must be causal"),
        ({"second": torch.eye(3) + torch.diag(torch.ones(2), 1)}, r"second must be causal"),
        ({"first": torch.eye(4)}, r"first must be \(N, N\), the same N for both layers; got \(4, 4\)"),
        ({"second": torch.ones(3)}, r"second must be \(N, N\)"),
        ({"query": 3}, r"query must be a token from 0 to 2, got 3"),
        ({"source": -1}, r"source must be a token from 0 to 2, got -1"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"second": torch.eye(3), "first": torch.eye(3), "query": 0, "source": 0}
    with pytest.raises(ValueError, match=message):
        path_weights(**{**arguments, **change})
