"""Property 1: through which tokens two causal layers can pass something on.

Shapes: N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
