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
from functools import cached_property
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
from kvshift.ops.boundaries import ShiftPlan, plan_shift
from kvshift.ops.cpu.kernel import shift_cpu
from kvshift.ops.dispatch import Call, ShiftPath, shift_path
from kvshift.ops.shift import shift_keys_values


@dataclass
class PagedShiftMetadata(AttentionMetadata):
    """Which rows of the cache a batch writes and reads; the same for all layers of a group.

    What depends on numbers in tensors is looked up on a CPU alone: the host would wait for a GPU.
    """

    num_tokens: int
    """P; what a CUDA graph pads the batch with comes behind."""
    one_token_each: bool
    """Whether each piece is one token: a step of decoding."""
    cu_seqlens: Tensor
    """(S + 1,) where each sequence's piece begins in the pack."""
    stored: Tensor | None
    """Which tokens are written: indices on a CPU, None for all; elsewhere booleans (P, 1)."""
    own: Tensor
    """Row of each token that is written, or, with booleans, of each token."""
    before: Tensor
    """(S (W - 1),) rows of the tokens before each piece, the newest last."""
    began: Tensor
    """(S (W - 1), 1) False where such a token would come before the first of its sequence."""
    same_block: Tensor
    """(S (W - 1), 1) True where such a token stands in the block in which its piece begins."""

    @cached_property
    def all_began(self) -> bool:
        """Whether no piece reaches back to before its sequence; False where that would have to be waited for."""
        return self.began.is_cpu and bool(self.began.all())

    @cached_property
    def all_same_block(self) -> bool:
        """Whether every row that is read stands in the block of its piece; False where it would be waited for."""
        return self.same_block.is_cpu and bool(self.same_block.all())

    @cached_property
    def plan(self) -> ShiftPlan:
        """What each token reads; the rows of `before` stand in front of the tokens."""
        lags = len(self.before) // (len(self.cu_seqlens) - 1)
        return plan_shift(1, self.num_tokens, lags + 1, lags, self.before.device, cu_seqlens=self.cu_seqlens)


class PagedShiftMetadataBuilder(AttentionMetadataBuilder[PagedShiftMetadata]):
    """Made once for the layers of a group, called once for each batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER  # graphs end before a shift

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.tokens_per_row = int(kv_cache_spec.tokens_per_state)
        self.layer: Any = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.lags = torch.arange(1 - self.layer.options.window, 0, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedShiftMetadata:
        batch = common_attn_metadata
        rows = self.layer.kv_cache.shape[2]  # of a block; vLLM may have changed the size in the configuration
        block_size, stride = rows * self.tokens_per_row, self.layer.rows_per_block
        num_tokens = int(batch.query_start_loc_cpu[batch.num_reqs])
        cu_seqlens = batch.query_start_loc[: batch.num_reqs + 1]
        tokens = cu_seqlens.diff()

        # A row is written by the last token of a piece that has its place in the ring, before others read it.
        slots = batch.slot_mapping[:num_tokens]
        stored = slots >= 0
        if batch.max_query_len > rows:
            ends = torch.repeat_interleave(cu_seqlens[1:], tokens, output_size=num_tokens)
            is_last_of_piece = torch.arange(rows, num_tokens + rows, device=slots.device) >= ends
            stored &= is_last_of_piece | (slots % block_size >= block_size - rows)
        if not stored.is_cpu:
            slots, stored = torch.where(stored, slots, 0), stored[:, None]  # vLLM's null block
        elif stored.all():
            stored = None
        else:
            stored = stored.nonzero()[:, 0]
            slots = slots[stored]

        first = (batch.seq_lens[: batch.num_reqs] - tokens)[:, None]  # position of the first token of each piece
        before = first + self.lags
        began, before = before >= 0, before.clamp(min=0)
        in_table = before // block_size
        blocks = batch.block_table_tensor[: batch.num_reqs].gather(1, in_table)
        return PagedShiftMetadata(
            num_tokens=num_tokens,
            one_token_each=batch.max_query_len == 1 and num_tokens == batch.num_reqs,
            cu_seqlens=cu_seqlens,
            stored=stored,
            own=slots // block_size * stride + slots % rows,
            before=(blocks * stride + before % rows).flatten(),
            began=began.view(-1, 1),
            same_block=(in_table == first // block_size).view(-1, 1),
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
        self.kv_cache = torch.tensor([])  # (blocks, 1, rows, 2 G D), as soon as vLLM has bound it
        self.rows_per_block, self.rows_shape = 0, (0, 0)
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
        for made_of_them in ("weights", "weights_of_numbers"):
            self.__dict__.pop(made_of_them, None)

    @cached_property
    def weights(self) -> Tensor:
        """(2 G, W) coefficients of k's heads and of v's; what is not shifted is taken as it is."""
        in_force = self.coefficients()
        shape = next(iter(in_force.values())).shape
        as_it_is = torch.eye(1, shape[1], device=self.kv_cache.device).expand(shape)
        return torch.cat([in_force.get(target, as_it_is) for target in ("k", "v")])

    @cached_property
    def weights_of_numbers(self) -> tuple[Tensor, Tensor] | None:
        """(2 G D,) the weights of a token's numbers and of those before; None where that is not the operator's sum.

        It is where the kernel for CPUs would shift, with a window of 2, and no weight is zero and so reads nothing.
        """
        if self.path != "cpu" or self.weights.shape[1] != 2 or (self.weights == 0).any():
            return None
        now, before = self.weights.t().repeat_interleave(self.head_size, dim=1).unbind()
        return now, before

    @cached_property
    def path(self) -> ShiftPath:
        """Which implementation shifts."""
        return shift_path(Call((self.kv_cache,), (self.weights,), (), (None, None, None), "auto"))

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the cache from vLLM: (blocks, 1, rows, 2 G D), in one of its layouts."""
        numbers = kv_cache.shape[3]
        if kv_cache.stride(0) % numbers:
            raise ValueError(
                f"the layout of the KV cache must have blocks of whole rows, its strides are {kv_cache.stride()}"
            )
        self.kv_cache, self.rows_per_block = kv_cache, kv_cache.stride(0) // numbers
        self.rows_shape = ((kv_cache.shape[0] - 1) * self.rows_per_block + kv_cache.shape[2], numbers)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagedShiftBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """A few rows in the blocks of the attention; blocks of their own where layers differ in their windows.

        vLLM puts layers of one window, those of a draft model among them, into one group with one list of blocks for
        each request. More than one group it makes of equal pages alone.
        """
        heads = next(self.parameters(recurse=False)).shape[0]
        # One head as wide as all: then a row lies in one piece, whatever the layout.
        layout: dict[str, Any] = {"num_kv_heads": 1, "head_size": heads * self.head_size, "dtype": self.dtype}
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

    def shift_batch(self, kv: Tensor, metadata: PagedShiftMetadata) -> None:
        """Replace raw keys and values by shifted ones, (P, 2 G D): the keys of all heads, then the values."""
        stored, before = metadata.stored, metadata.before
        rows = self.kv_cache.as_strided(self.rows_shape, (self.rows_shape[1], 1))  # not kept: vLLM frees the cache
        # What stands in the block in which a piece begins is read before the piece is written over it; what stands in a
        # block before is read afterwards: it may be a hit in the prefix cache that this batch is filling.
        state = rows.index_select(0, before)
        kept = kv
        if stored is not None:
            kept = torch.where(stored, kv, 0) if stored.dtype == torch.bool else kv.index_select(0, stored)
        rows.index_copy_(0, metadata.own, kept)
        if not metadata.all_same_block:
            state = torch.where(metadata.same_block, state, rows.index_select(0, before))
        if not metadata.all_began:
            state = torch.where(metadata.began, state, 0)
        if metadata.one_token_each and self.weights_of_numbers is not None:
            # The same bits as the kernel's, for a third of the time before a processor computes anything.
            now, last = self.weights_of_numbers
            kv.copy_(torch.mul(kv, now).addcmul_(state, last))
            return
        heads, lags = self.weights.shape[0], self.weights.shape[1] - 1
        x, state = kv.view(1, -1, heads, self.head_size), state.view(-1, lags, heads, self.head_size)
        if self.path == "cpu":
            [shifted] = shift_cpu([x], [self.weights], [state], metadata.plan)
        else:
            shifted, *_ = shift_keys_values(
                x, x, self.weights, None, state=ShiftState(state, state, lags), cu_seqlens=metadata.cu_seqlens,
                seq_idx=None, mask=None, backend="auto", keep_state=False,
            )  # fmt: skip
        x.copy_(shifted)


@eager_break_during_capture
def kv_shift(kv: Tensor, layer_name: str) -> None:
    """Shift keys and values in place by the layer of that name; an operator, so that compilers do not look inside."""
    context = get_forward_context()
    if context.attn_metadata is None:  # vLLM measures memory: there are no sequences
        return
    metadata: PagedShiftMetadata = context.attn_metadata[layer_name]
    context.no_compile_layers[layer_name].shift_batch(kv[: metadata.num_tokens], metadata)


def _kv_shift_fake(kv: Tensor, layer_name: str) -> None:
    return


direct_register_custom_op("kv_shift", kv_shift, mutates_args=["kv"], fake_impl=_kv_shift_fake)
