"""vLLM's attention with a tail in each page: a few rows of raw keys and values behind the shifted ones of its tokens.

A page is the memory that vLLM allocates for one block of tokens in one layer. It may be larger than its tokens need,
because the kernels of `BACKENDS` accept any stride between pages. The raw rows therefore cost only their own bytes in
any model, without separate blocks, reserved memory or cache groups.

Shapes: G KV heads of this rank, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.math_utils import round_up
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    CommonAttentionMetadata,
    MultipleOf,
    subclass_attention_backend_with_overrides,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from kvshift.integrations.vllm_plugin.paged_shift import PagedShift, PagedShiftMetadata, Pages, UniformBatch

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
PREFERRED_BLOCK_SIZE = 64
"""Default number of tokens in a block; with vLLM's 16, raw rows would take 1 of every 17 bytes."""


class AttentionWithRawRows(Attention):
    """vLLM's attention with a tail in its pages.

    Args:
        shift_window: W. A page has W - 1 rows, one more for each token that may be drafted and rejected, and another
            with a draft model: in vLLM's second model runner its piece ends with a rejected token behind the new one.
        args, options: see `Attention`.

    Raises:
        ValueError: if vLLM has chosen a backend that is not in `BACKENDS`.
    """

    def __init__(self, *args: Any, shift_window: int, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.attn_backend.get_name() not in BACKENDS:
            raise ValueError(
                f"attention_backend must be one of {', '.join(BACKENDS)}, got {self.attn_backend.get_name()}: others "
                "may not support pages that also have raw keys and values"
            )
        config = get_current_vllm_config()
        self.shift_window, self.raw_dtype = shift_window, config.model_config.dtype
        self.num_raw_rows = shift_window - 1 + config.num_speculative_tokens + _has_draft_model(config)
        self.attn_backend = with_raw_rows(self.attn_backend)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Return the specification of a cache whose pages have a tail.

        If layers differ in their attention windows, vLLM needs pages of equal size. Layers with smaller keys and values
        then have blocks of more tokens, as many as fit.
        """
        layers = vllm_config.compilation_config.static_forward_context
        specs: dict[str, Any] = {
            name: Attention.get_kv_cache_spec(layer, vllm_config)
            for name, layer in layers.items()
            if isinstance(layer, Attention)
        }
        own = specs[self.layer_name]
        of_one_size = [own]
        windows = {getattr(spec, "sliding_window", None) for spec in specs.values()}
        if len(windows) > 1 and not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            if _has_draft_model(vllm_config):
                raise ValueError(
                    "speculative_config: all layers of the model and of its draft model must have the same attention "
                    "window, or none, unless disable_hybrid_kv_cache_manager is set; otherwise vLLM overwrites the "
                    "model's cache with that of the draft model"
                )
            of_one_size = [*specs.values()]
        page = max(spec.page_size_bytes for spec in of_one_size)
        rows = {_row_bytes(spec, self.raw_dtype) for spec in of_one_size}
        padded = round_up(page + self.num_raw_rows * max(rows), math.lcm(*rows))
        block_size = page // own.page_size_bytes * own.block_size
        spec = replace(own, block_size=block_size, page_size_padded=padded)
        if not supports_whole_blocks(self.attn_backend, block_size, spec):
            raise ValueError(
                f"block_size must give every layer blocks that {self.attn_backend.get_name()} does not split, of "
                f"{self.attn_backend.get_supported_kernel_block_sizes(spec)} tokens; with {own.block_size}, "
                f"{self.layer_name} has blocks of {block_size}"
            )
        return spec

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take vLLM's cache, (pages, G, tokens, 2 D) in one of its layouts, and check that its pages have a tail."""
        super().bind_kv_cache(kv_cache)
        _, heads, tokens, numbers = kv_cache.shape
        row, before = heads * numbers * self.raw_dtype.itemsize, tokens * heads * numbers * kv_cache.itemsize
        page = kv_cache.stride(0) * kv_cache.itemsize
        if page % row or page < before + self.num_raw_rows * row:
            raise ValueError(
                f"pages of {self.layer_name} must be whole rows of {heads * numbers} numbers of {self.raw_dtype}, with "
                f"room for {self.num_raw_rows} raw rows after those of their tokens; vLLM has allocated "
                f"{tuple(kv_cache.shape)} of {kv_cache.dtype} with strides {kv_cache.stride()}"
            )
        stride, rows = page // row, self.num_raw_rows
        count = (kv_cache.shape[0] - 1) * stride + rows
        if count >= 2**31:
            raise ValueError(
                f"the KV cache must have fewer than 2^31 raw rows, because row numbers have 32 bits; got {count}"
            )
        self.pages, self._tail = Pages(tokens=tokens, rows=rows, stride=stride, count=count), before

    def raw_rows(self) -> Tensor:
        """Return the cache as (rows, 2 G D) from the first raw row; those of the next page follow at `pages.stride`.

        Raw rows have the dtype of the model, even if shifted keys and values have 8 bits. The view is made anew for
        each batch: vLLM frees the cache, so nothing may hold a reference to it.
        """
        cache, numbers = self.kv_cache.view(self.raw_dtype), self.kv_cache.shape[1] * self.kv_cache.shape[3]
        begin = cache.storage_offset() + self._tail // self.raw_dtype.itemsize
        return cache.as_strided((self.pages.count, numbers), (numbers, 1), begin)

    def raw_rows_address(self) -> int:
        """Return the memory address of the first row of `raw_rows`."""
        return self.kv_cache.data_ptr() + self._tail


def supports_whole_blocks(backend: type[AttentionBackend], block_size: int, spec: AttentionSpec | None = None) -> bool:
    """Return True if the kernels of `backend` take pages of `block_size` tokens undivided.

    vLLM splits other pages into smaller ones, which is impossible with a tail.
    """
    sizes = backend.get_supported_kernel_block_sizes(spec)
    return not sizes or any(
        block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size == size for size in sizes
    )


def _has_draft_model(config: VllmConfig) -> bool:
    return config.speculative_config is not None and config.speculative_config.method == "draft_model"


def _row_bytes(spec: AttentionSpec, raw_dtype: torch.dtype) -> int:
    """Return the size in bytes of the raw keys and values of one token."""
    return spec.unpadded_page_size_bytes // spec.block_size // spec.dtype.itemsize * raw_dtype.itemsize


def _all_support_uniform(layers: Mapping[str, Any]) -> bool:
    """Return True if there are shifts and each takes a uniform batch in one launch."""
    supported = [layer.supports_uniform for layer in layers.values() if isinstance(layer, PagedShift)]  # checks each
    return bool(supported) and all(supported)


@cache
def with_raw_rows(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return `backend` with `kv_shift` in its metadata, which says which raw rows a batch writes and reads."""
    builder: Any = backend.get_builder_cls()

    class Builder(builder):
        """The metadata builder of `backend`; each metadata is valid only for one batch and one block table."""

        supports_update_block_table = False

        @classmethod
        def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
            """Return the support of `backend`, at most UNIFORM_BATCH; NEVER if shifts take more than one launch."""
            layers = vllm_config.compilation_config.static_forward_context
            if not _all_support_uniform(layers):
                return AttentionCGSupport.NEVER  # graphs are split at every shift
            theirs = super().get_cudagraph_support(vllm_config, kv_cache_spec)
            return min(theirs, AttentionCGSupport.UNIFORM_BATCH, key=lambda support: support.value)

        @classmethod
        def get_varlen_cudagraph_max_query_len(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> int | None:
            return None

        def __init__(
            self,
            kv_cache_spec: Any,
            layer_names: list[str],
            vllm_config: VllmConfig,
            device: torch.device,
            **options: Any,
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device, **options)
            self.supports_draft_decode_metadata_update = False
            layers = vllm_config.compilation_config.static_forward_context
            layer: Any = layers[layer_names[0]]
            self.supports_uniform = _all_support_uniform(layers)
            self.attention = layer

        def build(
            self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            pages, uniform = self.attention.pages, None
            if self.supports_uniform:
                uniform = UniformBatch.from_batch(common_attn_metadata, pages)
            metadata.kv_shift = uniform or PagedShiftMetadata.from_batch(
                common_attn_metadata, pages, self.attention.shift_window
            )
            return metadata

    def preferred_block_size(default_block_size: int) -> int:
        larger = max(default_block_size, PREFERRED_BLOCK_SIZE)
        return (
            larger if supports_whole_blocks(backend, larger) else backend.get_preferred_block_size(default_block_size)
        )

    overrides = {"get_builder_cls": lambda: Builder, "get_preferred_block_size": preferred_block_size}
    return subclass_attention_backend_with_overrides(
        "Shifted", backend, {name: staticmethod(override) for name, override in overrides.items()}
    )
