"""Smeared embeddings: a gated part of the previous token's embedding is added to each embedding.

    y[t] = x[t] + scale * sigmoid(gate . x[t, :12]) * x[t-1],    x[t-1] = 0 where a document begins

The model has one scale and one gate. Both are initialised to 0, so that a smeared model starts out as its vanilla
counterpart. A cache stores the last embedding in its first layer, in the place of the raw rows of a shift.

Source: modded-nanogpt (train_gpt.py, smear_gate and smear_lambda), which does not keep documents apart.

Shapes: B batch, T positions, E model width, R rows of state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvshift import KVShift, ShiftOptions, ShiftState
from kvshift.models.extending import CACHE
from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.variants.mixing import tokens_before
from kvshift_lab.variants.model_classes import prepend_class, variant_class
from kvshift_lab.variants.small_gpt2 import LabGPT2
from kvshift_lab.variants.token_mixing import require_token_mask
from kvshift_lab.variants.variant import ModelVariant

_GATED_BY = 12


class Smear(nn.Module):
    """The formula above, computed in float32 (float64 for float64) and rounded once.

    Args:
        width: E; if it is less than 12, the gate reads all dimensions.

    Attributes:
        gate: (min(12, E),).
        scale: (1,), the lambda of the source.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(min(_GATED_BY, width)))
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(
        self, x: Tensor, layer: Any = None, *, mask: Tensor | None = None, seq_idx: Tensor | None = None
    ) -> Tensor:
        """Return the smeared embeddings, (B, T, E).

        Args:
            x: embeddings, (B, T, E).
            layer: layer of a cache (`kvshift.models.cache`) whose state has the previous embeddings and is updated;
                None if every row begins here.
            mask, seq_idx: (B, T), as in `kvshift.kv_shift`.
        """
        if layer is not None and layer.record_past and mask is not None:
            x, mask = x.masked_fill(~mask.unsqueeze(2), 0), None  # as the layer does with keys and values
        state = None if layer is None else layer.shift_state
        rows, max_rows = (None, 1) if state is None else (state.k, state.rows)
        if layer is not None and layer.record_past:
            max_rows += x.shape[1]
        before_BT1E, rows = tokens_before(x.unsqueeze(2), state=rows, max_rows=max_rows, mask=mask, seq_idx=seq_idx)
        if layer is not None:
            layer.write_shift(ShiftState(rows, rows[..., :0], max_rows))
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        gate, scale = self.gate.to(dtype), self.scale.to(dtype)
        gate_BT1 = torch.sigmoid((x[..., : len(gate)].to(dtype) * gate).sum(-1, keepdim=True))
        return (x.to(dtype) + scale * gate_BT1 * before_BT1E.squeeze(2).to(dtype)).to(x.dtype)


class _SmearedDecoder:
    """A mixin for the decoder of a family, a `kvshift.models.decoder.ShiftedDecoder`."""

    smear: Smear

    def prepare_inputs(self, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **where: Any) -> Any:
        if not isinstance(attention_mask, dict):
            require_token_mask(attention_mask, "smeared embeddings")
        return super().prepare_inputs(inputs_embeds, attention_mask, *args, **where)  # type: ignore[misc]

    def run_layers(self, hidden_states: Tensor, masks: dict[str, Tensor | None], **kwargs: Any) -> Any:
        layer = None if kwargs[CACHE] is None else kwargs[CACHE].layers[0]
        smeared = self.smear(hidden_states, layer, mask=masks["padding"], seq_idx=masks["documents"])
        return super().run_layers(smeared, masks, **kwargs)  # type: ignore[misc]


def _smear(model: Any) -> None:
    """Smear the embeddings of a model. Its `shift_targets` only make caches store a row; no keys are shifted."""
    decoder = model.base_model
    prepend_class(decoder, _SmearedDecoder)
    decoder.smear = Smear(model.get_input_embeddings().embedding_dim)
    for module in list(model.modules()):
        if isinstance(getattr(module, "shift", None), KVShift):
            module.shift = KVShift(1, ShiftOptions(targets=()))


MODEL_VARIANTS = (
    ModelVariant(
        name="smear",
        models={base.config_class: variant_class(base, "Smear", _smear) for base in (KVShiftLlamaForCausalLM, LabGPT2)},
        fields={"shift_targets": ["k"], "shift_window": 2},
    ),
)
