"""The shift of one layer, whose state is paged beside vLLM's KV cache.

vLLM runs a batch as one pack of pieces of sequences: a whole prompt, a chunk of one, one token, or a token and drafts
that may be rejected. A block of the cache has, beside shifted keys and values of its tokens, a few rows of raw ones: a
ring, in which the token at position p has row p % rows. Only the last tokens of a block are ever read from it, so a row
or two are enough; with drafts, which may be taken back, there are as many more. A piece continues from the rows of the
tokens before its first. So one path serves prefill, chunks, decoding, hits in the prefix cache, preemption and rejected
drafts, and a block that is shared, freed or found again brings its raw keys and values with it.

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
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

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
    """Which tokens are written: indices on a CPU; elsewhere booleans (P,), for which the host need not wait."""
    own: tuple[Tensor, Tensor]
    """Block of each token that is written, or of each token, and its row in the block."""
    before: tuple[Tensor, Tensor]
    """(S, W - 1) each: block and row of the tokens before each piece, the newest last."""
    began: Tensor
    """(S, W - 1) False where such a token would come before the first of its sequence."""
    same_block: Tensor
    """(S, W - 1) True where such a token stands in the block in which its piece begins."""


class PagedShiftMetadataBuilder(AttentionMetadataBuilder[PagedShiftMetadata]):
    """Made once for the layers of a group, called once for each batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER  # graphs end before a shift

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.tokens_per_row = int(kv_cache_spec.tokens_per_state)
        self.layer: Any = vllm_config.compilation_config.static_forward_context[layer_names[0]]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedShiftMetadata:
        batch = common_attn_metadata
        rows = self.layer.kv_cache.shape[2]  # of a block; vLLM may have changed the size in the configuration
        block_size = rows * self.tokens_per_row
        num_tokens = int(batch.query_start_loc_cpu[batch.num_reqs])
        cu_seqlens = batch.query_start_loc[: batch.num_reqs + 1]
        tokens = cu_seqlens.diff()

        # A row is written by the last token of a piece that has its place in the ring, before others read it.
        slots = batch.slot_mapping[:num_tokens]
        ends = torch.repeat_interleave(cu_seqlens[1:], tokens, output_size=num_tokens)
        is_last_of_piece = torch.arange(rows, num_tokens + rows, device=slots.device) >= ends
        stored = (slots >= 0) & (is_last_of_piece | (slots % block_size >= block_size - rows))
        if stored.is_cpu:
            stored = stored.nonzero()[:, 0]
            slots = slots[stored]
        else:
            slots = torch.where(stored, slots, 0)  # vLLM's null block

        first = batch.seq_lens[: batch.num_reqs] - tokens  # position of the first token of each piece
        before = first[:, None] + torch.arange(1 - self.layer.options.window, 0, device=first.device)
        began, before = before >= 0, before.clamp(min=0)
        blocks = batch.block_table_tensor[: batch.num_reqs].gather(1, (before // block_size).long())
        return PagedShiftMetadata(
            num_tokens=num_tokens,
            cu_seqlens=cu_seqlens,
            stored=stored,
            own=(slots // block_size, slots % rows),
            before=(blocks, before % rows),
            began=began,
            same_block=before // block_size == first[:, None] // block_size,
        )


class PagedShiftBackend(AttentionBackend):
    """What vLLM asks of a layer with a cache; there is no attention in it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """vLLM may cut a block in smaller ones for a kernel, but not its few rows."""
        if kv_cache_spec is None or kv_cache_spec.tokens_per_state == 1:
            return [MultipleOf(1)]
        return [kv_cache_spec.block_size]

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
        attention: name of the attention that takes the shifted keys and values.
        prefix: name of this module in the model.
    """

    def __init__(self, num_kv_heads: int, head_size: int, options: ShiftOptions, attention: str, prefix: str) -> None:
        ranks = get_tensor_model_parallel_world_size()
        local_heads = max(1, num_kv_heads // ranks)
        super().__init__(local_heads, options)
        copies = max(1, ranks // num_kv_heads)  # ranks that hold the same head
        self.first_head = get_tensor_model_parallel_rank() // copies * local_heads
        self.num_kv_heads, self.head_size, self.attention = num_kv_heads, head_size, attention
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(False)
            set_weight_attrs(parameter, {"weight_loader": self.load_heads})
        config = get_current_vllm_config()
        self.dtype = config.model_config.dtype
        self.kv_cache = torch.tensor([])  # (blocks, G, rows, 2 D), as soon as vLLM has bound it
        self.prefix = prefix
        layers = config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"prefix must be that of one layer, there are two of {prefix!r}")
        layers[prefix] = self

    def load_heads(self, parameter: nn.Parameter, loaded: Tensor) -> None:
        """Take this rank's heads of the coefficients of all."""
        expected = (self.num_kv_heads, parameter.shape[1])
        if loaded.shape != expected:
            raise ValueError(
                f"coefficients of {self.prefix} must be {expected}, KV heads and numbers of each; the checkpoint has "
                f"{tuple(loaded.shape)}"
            )
        parameter.data.copy_(loaded.narrow(0, self.first_head, parameter.shape[0]))

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagedShiftBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """A few rows in the blocks of the attention; blocks of their own where layers differ in their windows.

        vLLM puts layers of one window, those of a draft model among them, into one group with one list of blocks for
        each request. More than one group it makes of equal pages alone.
        """
        heads = next(self.parameters(recurse=False)).shape[0]
        layout: dict[str, Any] = {"num_kv_heads": heads, "head_size": self.head_size, "dtype": self.dtype}
        specs: dict[str, Any] = {
            name: layer.get_kv_cache_spec(vllm_config)
            for name, layer in vllm_config.compilation_config.static_forward_context.items()
            if isinstance(layer, AttentionLayerBase) and not isinstance(layer, PagedShift)
        }
        if len({(type(spec), getattr(spec, "sliding_window", None)) for spec in specs.values()}) > 1:
            drafts = vllm_config.speculative_config
            if drafts is not None and drafts.method == "draft_model":
                raise ValueError(
                    "speculative_config: all layers of the model and of its draft model must have one window of "
                    "attention, or none; otherwise vLLM writes what the draft model keeps over what the model keeps"
                )
            block_size, window = vllm_config.cache_config.block_size, self.options.window
            return SlidingWindowSpec(block_size=block_size, sliding_window=window, **layout)
        spec = specs[self.attention]
        rows = 1 << (self.options.window - 2 + vllm_config.num_speculative_tokens).bit_length()
        if spec.block_size % rows:
            raise ValueError(
                f"block_size must be a multiple of {rows}, the rows of raw keys and values in each block: shift_window "
                f"- 1 and num_speculative_tokens, to the next power of two; got {spec.block_size}"
            )
        layout |= {"block_size": spec.block_size, "tokens_per_state": spec.block_size // rows}
        if isinstance(spec, SlidingWindowSpec):
            return SlidingWindowSpec(sliding_window=spec.sliding_window, **layout)
        return FullAttentionSpec(**layout)

    def shift(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Shifted k and v, (P, G D) each, of raw ones; called by the layer's attention."""
        k_hat, v_hat = torch.empty_like(k), torch.empty_like(v)
        torch.ops.vllm.kv_shift(k, v, k_hat, v_hat, self.prefix)
        return k_hat, v_hat

    def shift_batch(self, k: Tensor, v: Tensor, metadata: PagedShiftMetadata) -> tuple[Tensor, Tensor]:
        """Shifted k and v, (P, G, D) each."""
        cache, size, stored = self.kv_cache, self.head_size, metadata.stored
        blocks, places = metadata.before
        # What stands in the block in which a piece begins is read before the piece is written over it; what stands in a
        # block before is read afterwards: it may be a hit in the prefix cache that this batch is filling.
        earlier = cache[blocks, :, places]
        for x, numbers in ((k, slice(size)), (v, slice(size, None))):
            kept = torch.where(stored[:, None, None], x, 0) if stored.dtype == torch.bool else x[stored]
            cache[metadata.own[0], :, metadata.own[1], numbers] = kept
        rows = torch.where(metadata.same_block[..., None, None], earlier, cache[blocks, :, places])
        rows = torch.where(metadata.began[..., None, None], rows, 0)
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
