"""KV shift in vLLM: models whose raw keys and values are paged beside the KV cache. See docs/serving.md.

vLLM finds `register` by the entry point "kvshift" of "vllm.general_plugins" and calls it in each of its processes.
"""

_MODELS = "kvshift.integrations.vllm_plugin.served_models"
_ARCHITECTURES = {
    "KVShiftLlamaForCausalLM": "ServedLlama",
    "KVShiftMistralForCausalLM": "ServedLlama",
    "KVShiftQwen2ForCausalLM": "ServedLlama",
    "KVShiftQwen3ForCausalLM": "ServedLlama",
}


def register() -> None:
    """Make configurations and models known to vLLM; may be called again."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig

    import kvshift.models.baichuan_m1
    import kvshift.models.llama
    import kvshift.models.retrofit  # noqa: F401

    for architecture, name in _ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, f"{_MODELS}:{name}")
    operators = CompilationConfig._attention_ops
    if "vllm::kv_shift" not in operators:
        operators.append("vllm::kv_shift")  # graphs are captured between these operators, not through them
