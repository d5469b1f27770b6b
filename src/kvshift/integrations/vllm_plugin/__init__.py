"""KV shift in vLLM: models whose raw keys and values are stored in the pages of the KV cache. See docs/serving.md.

vLLM finds `register` through the entry point "kvshift" in the group "vllm.general_plugins" and calls it in each of its
processes.
"""

SERVED_MODEL_TYPES = ("kvshift_llama", "kvshift_mistral", "kvshift_qwen2", "kvshift_qwen3", "baichuan_m1")
_MODELS = "kvshift.integrations.vllm_plugin.served_models"


def register() -> None:
    """Register configurations and models with vLLM. It may be called more than once."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import kvshift.models.baichuan_m1  # noqa: F401  # registers its configuration
    from kvshift.integrations.vllm_plugin.start_checks import ShiftChecks
    from kvshift.models import retrofit

    # Register all families: `ShiftChecks` refuses by name those that are not in SERVED_MODEL_TYPES.
    models = [model.__name__ for family in retrofit.FAMILIES for model in family.models.values()]
    served = dict.fromkeys(models, "ServedLlama") | {"BaichuanM1ForCausalLM": "ServedBaichuanM1"}
    for architecture, name in served.items():
        ModelRegistry.register_model(architecture, f"{_MODELS}:{name}")
        MODELS_CONFIG_MAP[architecture] = ShiftChecks
    operators = CompilationConfig._attention_ops
    if "vllm::kv_shift" not in operators:
        operators.append("vllm::kv_shift")  # vLLM splits piecewise graphs at these operators
