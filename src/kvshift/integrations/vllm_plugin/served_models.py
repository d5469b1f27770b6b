"""The models that vLLM runs: its Llama with shifted attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from kvshift.integrations.vllm_plugin.served_attention import ServedAttention
from kvshift.models.baichuan_m1.head import row_lengths
from kvshift.models.baichuan_m1.layout import to_coefficients

_COEFFICIENTS = {"conv_k": "shift.alpha", "conv_v": "shift.beta", "K": "shift.alpha", "V": "shift.beta"}


class ShiftedLlamaDecoderLayer(LlamaDecoderLayer):
    """vLLM's decoder layer with `ServedAttention`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=ServedAttention)


class ServedLlama(LlamaForCausalLM):
    """KVShiftLlama, and Llama, Mistral, Qwen2 and Qwen3 with a retrofitted shift."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=ShiftedLlamaDecoderLayer)


class ServedBaichuanM1(ServedLlama):
    """Baichuan-M1 from its released layout; loading scales the rows of the LM head to length 1."""

    packed_modules_mapping = LlamaForCausalLM.packed_modules_mapping | {"qkv_proj": ["W_pack"]}
    # Quantization reads it; vLLM's Llama loads weights with its own.
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={"W_pack": "qkv_proj"}) | LlamaForCausalLM.hf_to_vllm_mapper

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self._renamed(weights))

    @staticmethod
    def _renamed(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        given: dict[str, str] = {}
        for name, weight in weights:
            start, _, last = name.rpartition(".")
            if start.endswith(".self_attn") and last in _COEFFICIENTS:
                first = given.setdefault(f"{start}.{_COEFFICIENTS[last]}", name)
                if first != name:
                    raise ValueError(f"the checkpoint has both {first} and {name}, two names of one weight")
                name, weight = f"{start}.{_COEFFICIENTS[last]}", to_coefficients(weight)
            elif start == "lm_head":
                if last != "weight" or not weight.is_floating_point() or weight.itemsize == 1:
                    raise ValueError(f"the LM head must not be quantized, got {name} of {weight.dtype}")
                weight = weight / row_lengths(weight)[:, None]  # at least float32
            yield name.replace("W_pack", "qkv_proj"), weight
