"""Start weights of `kvshift train` and torchtitan for `fifty_steps.json`, without importing torchtitan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def start_weights(shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return random weights for a state dict of transformers. Coefficients are about 0.5, so that both tokens count."""
    rng = torch.Generator().manual_seed(11)
    drawn = {}
    for name in sorted(shapes):
        middle = 0.5 if ".shift." in name else float(len(shapes[name]) == 1)
        drawn[name] = middle + 0.1 * torch.randn(shapes[name], generator=rng)
    return drawn
