"""Checks at start-up, which refuse options of vLLM that do not work with a shift or have not been tested with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from kvshift.integrations.vllm_plugin import SERVED_MODEL_TYPES

_ROTARY = ("default", "linear", "llama3", "yarn", "dynamic")
_DRAFTS = ("ngram", "draft_model")
_EIGHT_BIT_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2")
_TESTED_SCHEMES = ((("int", 8), ("int", 8)), (("float", 8), ("float", 8)), (("int", 4), None))
"""Tested schemes of compressed-tensors: type and bits of the weights and of the inputs; None if not quantized."""


class ShiftChecks(VerifyAndUpdateConfig):
    """Checks that vLLM runs for each model with a shift once all options are known, before anything is loaded."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raise a ValueError that names every refused option and the reason."""
        faults = [*_model_faults(vllm_config), *_option_faults(vllm_config)]
        if faults:
            raise ValueError(f"vLLM cannot serve this model with KV shift: {'; '.join(faults)}")


def _model_faults(vllm_config: VllmConfig) -> Iterator[str]:
    model = vllm_config.model_config
    config: Any = model.hf_config
    if config.model_type not in SERVED_MODEL_TYPES:
        yield f"model_type must be one of {', '.join(SERVED_MODEL_TYPES)}, got {config.model_type!r}"
        return
    architecture = (config.architectures or [""])[0]
    if not architecture.endswith("ForCausalLM"):
        yield f"architectures must be a causal language model, got {architecture!r}"
    if "q" in config.shift_targets:
        yield f"shift_targets must be keys and values only, got {config.shift_targets!r}: raw queries are not cached"
    if config.sliding_window is not None and config.sliding_window < config.shift_window:
        yield f"sliding_window must be at least shift_window, {config.shift_window}; got {config.sliding_window}"
    if config.model_type == "baichuan_m1" and config.tie_word_embeddings:
        yield "tie_word_embeddings must be False: rows of the LM head are scaled to length 1, embeddings are not"
    rotary = config.rope_parameters
    if rotary.get("rope_type", "default") not in _ROTARY or rotary.get("partial_rotary_factor", 1) != 1:
        yield f"rope_parameters must rotate whole heads and be of type {', '.join(_ROTARY)}; got {rotary}"
    trained = config.max_position_embeddings
    if rotary.get("rope_type") == "dynamic" and model.max_model_len > trained:
        yield (
            f"max_model_len must be at most max_position_embeddings, {trained}, with rope_parameters of type dynamic, "
            f"got {model.max_model_len}: beyond, angles depend on the length in transformers, but not in vLLM"
        )
    if not getattr(config, "is_causal", True):
        yield "is_causal must be True"


def _option_faults(vllm_config: VllmConfig) -> Iterator[str]:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    drafts, compilation = vllm_config.speculative_config, vllm_config.compilation_config
    if model.runner_type not in ("generate", "draft"):
        yield f"runner must be generate, got {model.runner_type!r}"
    if model.quantization is not None and not _is_tested(model):
        yield (
            "quantization must be that of a checkpoint with 8-bit weights and inputs (compressed-tensors) or 4-bit "
            "weights (AWQ, GPTQ, or compressed-tensors without an activation order of groups); got "
            f"{model.quantization!r}"
        )
    if model.enable_prompt_embeds:
        yield "enable_prompt_embeds is not tested"
    dtypes = (*_EIGHT_BIT_CACHES, "auto", str(model.dtype).removeprefix("torch."))
    if cache.cache_dtype not in dtypes:
        yield f"kv_cache_dtype must be one of {', '.join(dtypes)}, got {cache.cache_dtype!r}"
    if cache.kv_cache_dtype_skip_layers:
        yield "kv_cache_dtype_skip_layers must be left out: pages of two dtypes are not tested"
    if cache.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill must be off: raw keys and values of every token are needed"
    if vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None:
        yield "kv_transfer_config and kv_offloading_size must be left out: raw keys and values are not transferred"
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            yield f"{name} must be 1, got {getattr(parallel, name)}: it is not tested"
    ranks, names = parallel.tensor_parallel_size, ("num_key_value_heads", "num_swa_key_value_heads")
    kv_heads = [heads for name in names if (heads := getattr(model.hf_config, name, None))]
    if any(heads % ranks and ranks % heads for heads in kv_heads):
        yield f"tensor_parallel_size must divide the KV heads or be a multiple of them; got {ranks} for {kv_heads}"
    if parallel.enable_dbo or parallel.ubatch_size:
        yield "enable_dbo and ubatch_size must be left out: split batches are not tested"
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        yield "cpu_offload_gb and offload_group_size must be 0: the shift cannot read offloaded coefficients"
    if drafts is not None and drafts.method not in _DRAFTS:
        yield f"speculative_config must be of method {' or '.join(_DRAFTS)}, got {drafts.method!r}"
    if drafts is not None and drafts.enable_adaptive_verification:
        yield "enable_adaptive_verification of speculative_config is not tested"
    if drafts is not None and drafts.parallel_drafting:
        yield "parallel_drafting of speculative_config is not tested"
    if compilation.use_inductor_graph_partition:
        yield "use_inductor_graph_partition is not tested"
    splitting, mode = compilation.splitting_ops, compilation.mode  # in other modes vLLM empties the list
    is_split = mode in (None, CompilationMode.VLLM_COMPILE)
    if is_split and splitting is not None and "vllm::kv_shift" not in splitting:
        yield "splitting_ops must be left out or include vllm::kv_shift"


def _is_tested(model: Any) -> bool:
    """Return True if all quantized weights and their inputs use a tested scheme: see docs/serving.md."""
    config = model.hf_config  # vLLM reads either name
    described = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None) or {}
    if model.quantization in ("auto_awq", "auto_gptq", "awq", "gptq"):
        # GPTQ's "dynamic" may quantize some layers with other numbers of bits.
        return (described.get("bits") or described.get("w_bit")) == 4 and not described.get("dynamic")
    if model.quantization != "compressed-tensors" or described.get("kv_cache_scheme"):
        return False
    groups = described.get("config_groups", {}).values()
    return bool(groups) and all(
        _types_and_bits(group, "weights", "input_activations") in _TESTED_SCHEMES
        and group["weights"].get("actorder") in (None, "static", "weight")  # vLLM reads no order of inputs
        for group in groups
    )


def _types_and_bits(group: dict[str, Any], *names: str) -> tuple[Any, ...]:
    """Return (type, bits) for each name in a group of compressed-tensors; None for one that is not quantized."""
    kinds = [group.get(name) for name in names]
    return tuple(kind and (kind.get("type"), kind.get("num_bits")) for kind in kinds)
