"""Weights that both `kvshift train` and torchtitan start from, for `fifty_steps.json`. No import of torchtitan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def start_weights(shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Drawn for a state dict of transformers; coefficients about 0.5, so that both tokens are read."""
    rng = torch.Generator().manual_seed(11)
    drawn = {}
    for name in sorted(shapes):
        middle = 0.5 if ".shift." in name else float(len(shapes[name]) == 1)
        drawn[name] = middle + 0.1 * torch.randn(shapes[name], generator=rng)
    return drawn
