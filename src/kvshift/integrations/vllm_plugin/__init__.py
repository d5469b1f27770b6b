"""KV shift in vLLM: models whose raw keys and values lie in the pages of the KV cache. See docs/serving.md.

vLLM finds `register` by the entry point "kvshift" of "vllm.general_plugins" and calls it in each of its processes.
"""

SERVED_MODEL_TYPES = ("kvshift_llama", "kvshift_mistral", "kvshift_qwen2", "kvshift_qwen3", "baichuan_m1")
_MODELS = "kvshift.integrations.vllm_plugin.served_models"


def register() -> None:
    """Make configurations and models known to vLLM; may be called again."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import kvshift.models.baichuan_m1  # noqa: F401  # which makes its configuration known
    from kvshift.integrations.vllm_plugin.start_checks import ShiftChecks
    from kvshift.integrations.vllm_plugin.start_fault import keep_start_fault
    from kvshift.models import retrofit

    keep_start_fault()

    # All that can be made: `ShiftChecks` refuses the families that are not in the list above, by name.
    models = [model.__name__ for family in retrofit.FAMILIES for model in family.models.values()]
    served = dict.fromkeys(models, "ServedLlama") | {"BaichuanM1ForCausalLM": "ServedBaichuanM1"}
    for architecture, name in served.items():
        ModelRegistry.register_model(architecture, f"{_MODELS}:{name}")
        MODELS_CONFIG_MAP[architecture] = ShiftChecks
    operators = CompilationConfig._attention_ops
    if "vllm::kv_shift" not in operators:
        operators.append("vllm::kv_shift")  # piecewise graphs are captured between these operators
