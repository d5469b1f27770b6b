"""The models that vLLM runs: its Llama, around attention with a shift."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

from kvshift.integrations.vllm_plugin.served_attention import ShiftedLlamaAttention


class ShiftedLlamaDecoderLayer(LlamaDecoderLayer):
    """vLLM's layer around `ShiftedLlamaAttention`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=ShiftedLlamaAttention)


class ServedLlama(LlamaForCausalLM):
    """KVShiftLlama, and retrofitted Llama, Mistral, Qwen2 and Qwen3."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=ShiftedLlamaDecoderLayer)
