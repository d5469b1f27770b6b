"""Property 1 for the layers of this package: through which tokens two causal layers can pass information.

Token k adds A2[query, k] A1[k, source] to the weight with which a query attends to a source through two layers. With a
causal mask, A1[k, source] is 0 for k < source. Therefore, the content of token i + 1 cannot reach a later token through
token i: an induction head of two layers must first copy token i into token i + 1, and that takes width.
"""

import pytest
import torch

from kvshift import KVShiftAttention, ShiftOptions
from kvshift_lab.core.seeds import generator_for

N = 7


def token_map(shift_targets, seed):
    """Return M with out = M x for a layer with random queries and keys, as attention is linear in its values."""
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
    paths = second[query] * first[:, source]
    assert torch.equal(paths != 0, (torch.arange(N) >= source) & (torch.arange(N) <= query))
