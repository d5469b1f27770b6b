"""Property 1, about the layers of this package: through which tokens two causal layers can pass something on."""

import pytest
import torch
from torch import Tensor

from kvshift import KVShiftAttention, ShiftOptions
from kvshift.lab.core.seeds import generator_for

pytestmark = pytest.mark.no_models

N = 7


def path_weights(second: Tensor, first: Tensor, query: int, source: int) -> Tensor:
    """What each token k adds to the weight with which `query` sees `source` through two layers.

        paths[k] = A2[query, k] A1[k, source],    sum_k paths[k] = (A2 A1)[query, source]

    With a causal mask A1[k, source] is 0 for k < source. So what token i + 1 holds cannot reach a later token by way
    of token i: an induction head of two layers must first copy token i into token i + 1, and that takes width.

    Args:
        second, first: A2 and A1, (N, N): row j holds the weights with which token j attends.
        query: j, from 0.
        source: i + 1, from 0.

    Returns:
        (N,).

    Raises:
        ValueError: a matrix is not square or not causal, the two differ in size, or a token is not among the N.

    Source:
        Property 1.
    """
    for name, matrix in (("second", second), ("first", first)):
        if matrix.ndim != 2 or matrix.shape != second.shape or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"{name} must be (N, N), the same N for both layers; got {tuple(matrix.shape)}")
        if torch.count_nonzero(matrix.triu(1)):
            raise ValueError(f"{name} must be causal, with zeros above the diagonal; {name}.triu(1) has others")
    for name, token in (("query", query), ("source", source)):
        if not 0 <= token < second.shape[0]:
            raise ValueError(f"{name} must be a token from 0 to {second.shape[0] - 1}, got {token}")
    return second[query] * first[:, source]


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
