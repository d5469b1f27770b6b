"""The head of Baichuan-M1, which normalises the rows of its matrix to length 1.

Shapes: E model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class NormHead(nn.Module):
    """A linear head without bias whose rows have length 1.

        logits[v] = x . weight[v],  weight[v] = raw[v] / (|raw[v]| + 1e-7)

    `weight` is the matrix that multiplies the hidden states, for code that reads it, such as fused losses. It is
    computed at each access, so that what is written to it is lost. `raw` is the parameter, called `lm_head.weight` in
    checkpoints.

    `forward` divides the logits, in float32, instead of the rows, and so needs no second matrix. The class does not
    extend nn.Linear, whose weight adapters and quantization would replace without scaling the rows again.
    """

    bias = None  # fused losses read it

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.empty(out_features, in_features))
        self._keeps_lengths = False
        self._kept_lengths: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.raw, a=5**0.5)  # as in nn.Linear

    @property
    def weight(self) -> Tensor:
        """Matrix (V, E) with rows of length 1; differentiable."""
        return (self.raw / row_lengths(self.raw)[:, None]).to(self.raw.dtype)

    def forward(self, x: Tensor) -> Tensor:
        logits, lengths = functional.linear(x, self.raw), self._row_lengths()
        return (logits.to(lengths.dtype) / lengths).to(logits.dtype)

    def _row_lengths(self) -> Tensor:
        if not self._keeps_lengths or torch.compiler.is_compiling():
            return row_lengths(self.raw)
        lengths = self._kept_lengths
        if lengths is None:
            lengths = self._kept_lengths = row_lengths(self.raw)
        return lengths

    @contextmanager
    def keeping_lengths(self) -> Iterator[None]:
        """Compute the V row lengths once, not at every call. `raw` must not change within this context."""
        self._keeps_lengths = True
        try:
            yield
        finally:
            self._keeps_lengths, self._kept_lengths = False, None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy holds; one that is made within `keeping_lengths` is outside of it."""
        return {**self.__dict__, "_keeps_lengths": False, "_kept_lengths": None}

    def extra_repr(self) -> str:
        return f"{self.raw.shape[1]}, {self.raw.shape[0]}, rows of length 1"


def row_lengths(matrix: Tensor) -> Tensor:
    """Return the divisors of the rows, (V,): their L2 norms + 1e-7, in float32 or wider."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    return torch.linalg.vector_norm(matrix, dim=1, dtype=wide) + 1e-7


def require_norm_head(module: nn.Module) -> None:
    """Raise a TypeError if a new `lm_head` contains no NormHead, as FSDP's wrapper does, or contains an adapter."""
    parts = list(module.modules())
    adapter = next((part for part in parts if type(part).__module__.startswith("peft.tuners")), None)
    if adapter is not None or not any(isinstance(part, NormHead) for part in parts):
        kind = type(adapter or module)
        raise TypeError(
            f"lm_head must be a NormHead, which scales its rows to length 1; got {kind.__module__}.{kind.__name__}. Do "
            'not adapt or replace lm_head; PEFT can train all of it: modules_to_save=["lm_head"]'
        )
