"""KV shift whose coefficients start near those of an induction head (Theorem 3.3), alpha = (0, 1) and beta = (1, 0).

    alpha = (0.1 u, 1 - 0.1 u)        beta = (1 - 0.1 w, 0.1 w)        u, w ~ U(0, 1) for each KV head

In the paper's start values, alpha = (u, 1 - u) and beta = (w, 1 - w), with the same u and w for the same seed. Section
3.2 says that heads which start closer to (alpha_1, beta_1) = (0, 1) learn to be induction heads much more easily.

Shapes: G KV heads, two lags.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvshift_lab.variants.variant import ModelVariant, Size, shift_layers

_SPREAD = 0.1


class InductionStart(ModelVariant):
    """KV shift of keys and values with the start values above."""

    def build(self, size: Size, *, seed: int) -> PreTrainedModel:
        """See `ModelVariant.build`."""
        model = super().build(size, seed=seed)
        for layer in shift_layers(model):
            with torch.no_grad():
                for name, small in (("alpha", 0), ("beta", 1)):
                    start_G2 = layer.get_parameter(name)
                    start_G2[:, small] = _SPREAD * start_G2[:, 0]
                    start_G2[:, 1 - small] = 1 - start_G2[:, small]
        return model


MODEL_VARIANTS = (
    InductionStart(name="kv-shift-induction-start", fields={"shift_targets": ["k", "v"], "shift_window": 2}),
)
