"""The model whose limit Theorem 3.4 states, at a finite embedding width.

Shapes: B draws of the embeddings, T tokens of the vocabulary, d width. Tokens count from 1, as in the theorem.

The model has exactly the limit's loss with orthonormal embeddings; with Gaussian ones, N(0, 1/d), it converges to the
limit as d grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvshift import KVShiftAttention, kv_shift


def random_embeddings(batch: int, tokens: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw embeddings u_k ~ N(0, 1/d) in each component, (B, T, d) float64."""
    return torch.randn(batch, tokens, width, generator=generator, dtype=torch.float64) / math.sqrt(width)


def model_logits(embeddings: Tensor, repeated: int, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return the logits at the last position of x_1 .. x_T x_i.

        k_hat, v_hat = kv_shift(u, u, alpha, beta)
        logits = U softmax( u_{T+1} k_hat^T ) v_hat

    The identity projections are omitted, as each would be a matrix of 128 MiB at d = 4096. `layer_loss` has them.

    Args:
        embeddings: U, (B, T, d).
        repeated: i, from 1 to T - 1.
        alpha, beta: (a1, a2) and (b1, b2), (2,).

    Returns:
        (B, T), the logits of tokens 1 .. T; differentiable.

    Source:
        Theorem 3.4, "the simplified condition we describe".
    """
    x_BL1D = _sequence(embeddings, repeated).unsqueeze(2)
    k_hat, v_hat, _ = kv_shift(x_BL1D, x_BL1D, alpha.unsqueeze(0), beta.unsqueeze(0))
    # The last token attends to all tokens: the causal mask excludes none of them.
    weights = torch.einsum("bd,bsd->bs", x_BL1D[:, -1, 0], k_hat.squeeze(2)).softmax(dim=1)
    return _logits(embeddings, torch.einsum("bs,bsd->bd", weights, v_hat.squeeze(2)))


def model_loss(embeddings: Tensor, repeated: int, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return the cross-entropy of `model_logits` against x_{i+1}, (B,), in nats; differentiable."""
    return _cross_entropy(model_logits(embeddings, repeated, alpha, beta), repeated)


def build_layer(width: int) -> KVShiftAttention:
    """Build the same head as a `KVShiftAttention` in float64, of which only the coefficients are trainable.

    W_K = W_V = W_O = I; W_Q = sqrt(d) I, which cancels the layer's factor 1 / sqrt(d), absent from the theorem.
    """
    layer = KVShiftAttention(width, 1, position_encoding="none").double().requires_grad_(False)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        projection.weight.copy_(torch.eye(width, dtype=torch.float64))
    layer.q_proj.weight.mul_(math.sqrt(width))
    layer.shift.requires_grad_(True)
    return layer


def layer_loss(layer: KVShiftAttention, embeddings: Tensor, repeated: int) -> Tensor:
    """Compute `model_loss` with a layer from `build_layer`, at the layer's coefficients."""
    out, _ = layer(_sequence(embeddings, repeated))
    return _cross_entropy(_logits(embeddings, out[:, -1]), repeated)


def draw_losses(
    coefficients: tuple[float, float, float, float],
    *,
    tokens: int,
    repeated: int,
    width: int,
    draws: int,
    generator: torch.Generator,
) -> list[float]:
    """Return `model_loss` for independent draws of Gaussian embeddings.

    Args:
        coefficients: a1, a2, b1, b2.
        tokens, repeated, width: T, i, d.
        draws: number of draws.
        generator: generator of the embeddings.
    """
    point = torch.tensor(coefficients, dtype=torch.float64)
    losses: list[float] = []
    for batch in _batches(draws, tokens * width):
        embeddings = random_embeddings(batch, tokens, width, generator)
        losses += model_loss(embeddings, repeated, point[:2], point[2:]).tolist()
    return losses


def _batches(draws: int, numbers: int) -> Iterator[int]:
    """Yield batch sizes that sum to `draws`, each for about a million numbers (8 MiB) at most."""
    size = max(1, 2**20 // numbers)
    for start in range(0, draws, size):
        yield min(size, draws - start)


def _sequence(embeddings: Tensor, repeated: int) -> Tensor:
    """Return the sequence x_1 .. x_T x_i, (B, T + 1, d)."""
    if embeddings.ndim != 3:
        raise ValueError(f"embeddings must be (batch, tokens, width), got {tuple(embeddings.shape)}")
    tokens = embeddings.shape[1]
    if not 1 <= repeated <= tokens - 1:
        raise ValueError(f"repeated must be from 1 to {tokens - 1}, so that it has a successor; got {repeated}")
    return torch.cat([embeddings, embeddings[:, repeated - 1 : repeated]], dim=1)


def _logits(embeddings: Tensor, out: Tensor) -> Tensor:
    return torch.einsum("btd,bd->bt", embeddings, out)


def _cross_entropy(logits_BT: Tensor, repeated: int) -> Tensor:
    target_B = torch.full(logits_BT.shape[:1], repeated, device=logits_BT.device)  # the index of x_{i+1} from 0
    return F.cross_entropy(logits_BT, target_B, reduction="none")
