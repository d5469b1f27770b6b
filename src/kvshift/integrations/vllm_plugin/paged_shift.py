"""The shift of one layer, whose state is paged beside vLLM's KV cache.

vLLM runs a batch as one pack of pieces of sequences: a whole prompt, a chunk of one, one token, or a token and drafts
that may be rejected. Raw keys and values of every token have a slot of their own, found by its position, and a piece
continues from the slots before its first token. So one path serves prefill, chunks, decoding, hits in the prefix
cache, preemption and rejected drafts, which are simply overwritten.

Shapes: P positions in the pack, S sequences, G KV heads of this rank, D head size, W window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from kvshift.integrations.vllm_plugin.state_blocks import ShiftStateSpec
from kvshift.layers import KVShift, ShiftOptions
from kvshift.ops import ShiftState
from kvshift.ops.shift import shift_keys_values


@dataclass
class PagedShiftMetadata(AttentionMetadata):
    """Where the raw keys and values of a batch stand in the blocks; the same for all layers of a group."""

    num_tokens: int
    """P; what a CUDA graph pads the batch with comes behind."""
    cu_seqlens: Tensor
    """(S + 1,) where each sequence's piece begins in the pack."""
    stored: Tensor
    """Which tokens have a block: indices on a CPU, elsewhere booleans (P,), since the host does not wait for them."""
    own: tuple[Tensor, Tensor]
    """Block of each of them, or of each token, and its place in the block."""
    before: tuple[Tensor, Tensor]
    """(S, W - 1) each: those of the tokens before each piece, the newest last."""
    began: Tensor
    """(S, W - 1) False where such a token would come before the first of its sequence."""


class PagedShiftMetadataBuilder(AttentionMetadataBuilder[PagedShiftMetadata]):
    """Made once for the layers of a group, called once for each batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.NEVER
    )  # pieces between the shifts are captured

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layer: Any = vllm_config.compilation_config.static_forward_context[layer_names[0]]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedShiftMetadata:
        batch = common_attn_metadata
        block_size = self.layer.kv_cache.shape[2]  # vLLM may have changed the one in the configuration
        cu_seqlens = batch.query_start_loc[: batch.num_reqs + 1]
        num_tokens = int(batch.query_start_loc_cpu[batch.num_reqs])
        slots = batch.slot_mapping[:num_tokens]
        stored = slots >= block_size  # the first block is the null block: see `state_blocks.py`
        if stored.is_cpu:
            stored = stored.nonzero()[:, 0]
            slots = slots[stored]
        first = batch.seq_lens[: batch.num_reqs] - cu_seqlens.diff()  # position of the first token of each piece
        lags = torch.arange(1 - self.layer.options.window, 0, device=first.device)
        before = first[:, None] + lags
        began = before >= 0
        before = before.clamp(min=0)
        blocks = batch.block_table_tensor[: batch.num_reqs].gather(1, (before // block_size).long())
        return PagedShiftMetadata(
            num_tokens=num_tokens,
            cu_seqlens=cu_seqlens,
            stored=stored,
            own=(slots // block_size, slots % block_size),
            before=(blocks, before % block_size),
            began=began,
        )


class PagedShiftBackend(AttentionBackend):
    """What vLLM asks of a layer with a cache; there is no attention in it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "KV_SHIFT"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("a shift has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type[PagedShiftMetadataBuilder]:
        return PagedShiftMetadataBuilder


class PagedShift(KVShift, AttentionLayerBase):
    """Coefficients of this rank's KV heads, and the blocks with the raw keys and values of its layer.

    Args:
        num_kv_heads: of all ranks.
        head_size: D.
        options: what is shifted, and how; no queries.
        prefix: name of this module in the model.
    """

    def __init__(self, num_kv_heads: int, head_size: int, options: ShiftOptions, prefix: str) -> None:
        ranks = get_tensor_model_parallel_world_size()
        local_heads = max(1, num_kv_heads // ranks)
        super().__init__(local_heads, options)
        copies = max(1, ranks // num_kv_heads)  # ranks that hold the same head
        self.first_head = get_tensor_model_parallel_rank() // copies * local_heads
        self.head_size = head_size
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(False)
            set_weight_attrs(parameter, {"weight_loader": self.load_heads})
        config = get_current_vllm_config()
        self.dtype = config.model_config.dtype
        self.kv_cache = torch.tensor([])  # (blocks, G, places in a block, 2 D), as soon as vLLM has bound it
        self.prefix = prefix
        layers = config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"prefix must be that of one layer, there are two of {prefix!r}")
        layers[prefix] = self

    def load_heads(self, parameter: nn.Parameter, loaded: Tensor) -> None:
        """Take this rank's heads of the coefficients of all."""
        parameter.data.copy_(loaded.narrow(0, self.first_head, parameter.shape[0]))

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagedShiftBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return ShiftStateSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=next(self.parameters(recurse=False)).shape[0],
            head_size=self.head_size,
            dtype=self.dtype,
            sliding_window=self.options.window,
            extra_retained_tokens=2 * vllm_config.num_speculative_tokens,  # of two steps in flight
        )

    def shift(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Shifted k and v, (P, G D) each, of raw ones; called by the layer's attention."""
        k_hat, v_hat = torch.empty_like(k), torch.empty_like(v)
        torch.ops.vllm.kv_shift(k, v, k_hat, v_hat, self.prefix)
        return k_hat, v_hat

    def shift_batch(self, k: Tensor, v: Tensor, metadata: PagedShiftMetadata) -> tuple[Tensor, Tensor]:
        """Shifted k and v, (P, G, D) each."""
        cache, size = self.kv_cache, self.head_size
        blocks, places = metadata.own
        stored = metadata.stored
        # First every token of the batch is written, then what comes before each piece is read: a sequence may hit a
        # block of the prefix cache that another one of this batch is filling.
        for x, numbers in ((k, slice(size)), (v, slice(size, None))):
            kept = torch.where(stored[:, None, None], x, 0) if stored.dtype == torch.bool else x[stored]
            cache[blocks, :, places, numbers] = kept
        blocks, places = metadata.before
        rows = torch.where(metadata.began[..., None, None], cache[blocks, :, places], 0)
        k_hat, v_hat, _ = shift_keys_values(
            k[None],
            v[None],
            *(self.coefficients().get(target) for target in ("k", "v")),
            state=ShiftState(rows[..., :size], rows[..., size:], rows.shape[1]),
            cu_seqlens=metadata.cu_seqlens,
            seq_idx=None,
            mask=None,
            backend="auto",
            keep_state=False,
        )
        return k_hat[0], v_hat[0]


@eager_break_during_capture
def kv_shift(k: Tensor, v: Tensor, k_hat: Tensor, v_hat: Tensor, layer_name: str) -> None:
    """Fill k_hat and v_hat by the layer of that name; an operator, so that compilers do not look inside."""
    context = get_forward_context()
    if context.attn_metadata is None:  # vLLM measures memory: there are no sequences
        k_hat.copy_(k)
        v_hat.copy_(v)
        return
    layer: PagedShift = context.no_compile_layers[layer_name]
    metadata: PagedShiftMetadata = context.attn_metadata[layer_name]
    tokens = slice(metadata.num_tokens)
    heads = (metadata.num_tokens, -1, layer.head_size)
    shifted = layer.shift_batch(k[tokens].view(heads), v[tokens].view(heads), metadata)
    for out, x in zip((k_hat, v_hat), shifted, strict=True):
        out[tokens] = x.flatten(1)


def _kv_shift_fake(k: Tensor, v: Tensor, k_hat: Tensor, v_hat: Tensor, layer_name: str) -> None:
    return


direct_register_custom_op("kv_shift", kv_shift, mutates_args=["k_hat", "v_hat"], fake_impl=_kv_shift_fake)
