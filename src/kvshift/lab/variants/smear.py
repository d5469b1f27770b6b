"""The smear of embeddings: each token's embedding is given a gated part of the one before it.

    y[t] = x[t] + scale * sigmoid(gate . x[t, :12]) * x[t-1],    x[t-1] = 0 where a document begins

One scale and one gate for the whole model. They start at 0, so that a smeared model begins as its vanilla twin.

Source: modded-nanogpt (train_gpt.py, smear_gate and smear_lambda), which does not keep documents apart.

Shapes: B batch, T positions, E model width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from kvshift.lab.variants.small_gpt2 import LabGPT2, LabGPT2Config
from kvshift.lab.variants.uncached import UncachedConfig, UncachedDecoder, UncachedGeneration, become
from kvshift.lab.variants.variant import ModelVariant
from kvshift.models.boundaries import document_index, padding_mask
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM, KVShiftLlamaModel
from kvshift.models.retrofit import KVShiftGPT2Model
from kvshift.ops import shift_tokens

__all__ = ["VARIANT", "Smear", "SmearGPT2", "SmearGPT2Config", "SmearLlamaConfig", "SmearLlamaForCausalLM"]

_GATED_BY = 12


class Smear(nn.Module):
    """The formula above; the arithmetic is that of float32, rounded once.

    Args:
        width: E; of fewer than 12 the gate reads all.

    Attributes:
        gate: (12,).
        scale: (1,), the lambda of the source.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(min(_GATED_BY, width)))
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, *, mask: Tensor | None = None, seq_idx: Tensor | None = None) -> Tensor:
        """(B, T, E) of embeddings (B, T, E).

        Args:
            x: embeddings.
            mask, seq_idx: (B, T), as in `kvshift.kv_shift`.
        """
        only_before_12 = torch.tensor([[0.0, 1.0]], device=x.device)
        before_BTE = shift_tokens(x.unsqueeze(2), only_before_12, mask=mask, seq_idx=seq_idx)[0].squeeze(2).float()
        gate_BT1 = torch.sigmoid((x[..., : len(self.gate)].float() * self.gate.float()).sum(-1, keepdim=True))
        return (x.float() + self.scale.float() * gate_BT1 * before_BTE).to(x.dtype)


class _SmearedDecoder(UncachedDecoder):
    """Stands before the decoder of a family, whose arguments `attention_mask` to `cu_seq_lens_q` it shares."""

    smear: Smear

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)  # type: ignore[attr-defined]
        batch, positions = inputs_embeds.shape[:2]
        real = padding_mask(attention_mask, positions)
        documents = document_index(
            batch, positions, real, seq_idx=seq_idx, cu_seq_lens=cu_seq_lens_q, position_ids=position_ids
        )
        return super().forward(
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=self.smear(inputs_embeds, mask=real, seq_idx=documents),
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
            **kwargs,
        )


class _SmearedLlamaModel(_SmearedDecoder, KVShiftLlamaModel):
    pass


class _SmearedGPT2Model(_SmearedDecoder, KVShiftGPT2Model):
    pass


@strict
class SmearLlamaConfig(UncachedConfig, KVShiftLlamaConfig):
    """The fields of `KVShiftLlamaConfig`; `shift_targets` of a vanilla size is ()."""

    model_type = "kvshift_smear_llama"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.smear.SmearLlamaForCausalLM"


class SmearLlamaForCausalLM(UncachedGeneration, KVShiftLlamaForCausalLM):
    """`KVShiftLlamaForCausalLM` with smeared embeddings."""

    config: SmearLlamaConfig
    config_class = SmearLlamaConfig

    def __init__(self, config: SmearLlamaConfig) -> None:
        super().__init__(config)
        become(self.model, _SmearedLlamaModel)
        self.model.smear = Smear(config.hidden_size)


@strict
class SmearGPT2Config(UncachedConfig, LabGPT2Config):
    """The fields of `LabGPT2Config`."""

    model_type = "kvshift_smear_lab_gpt2"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.smear.SmearGPT2"


class SmearGPT2(LabGPT2):
    """`LabGPT2` with smeared embeddings."""

    config: SmearGPT2Config
    config_class = SmearGPT2Config

    def __init__(self, config: SmearGPT2Config) -> None:
        super().__init__(config)
        become(self.transformer, _SmearedGPT2Model)
        self.transformer.smear = Smear(config.n_embd)


VARIANT = ModelVariant(
    name="smear",
    models={KVShiftLlamaConfig: SmearLlamaForCausalLM, LabGPT2Config: SmearGPT2},
)
