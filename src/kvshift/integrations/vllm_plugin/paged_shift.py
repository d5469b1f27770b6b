"""The shift of one layer, whose state lies in the pages of vLLM's KV cache.

vLLM runs a batch as one pack of pieces of sequences: a whole prompt, a chunk of one, one token, or a token and drafts
that may be rejected. Behind the shifted keys and values of its block of tokens, a page of the cache has a few rows of
raw ones. They form a ring, in which token t of the block has row t % rows. Only the last tokens of a block are ever
read from it, so a row or two are enough, plus one for each draft that may be rejected. A piece continues from the rows
of the tokens before its first one. One path therefore serves prefill, chunks, decoding, hits in the prefix cache,
preemption and rejected drafts, and a block that is shared, freed or found again brings its raw keys and values along.

On a GPU, pieces of equal length, as in decoding, take a separate path: one launch, which a CUDA graph can contain.

Shapes: P positions in the pack, S sequences, G KV heads of this rank, D head size, W window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvshift.layers import KVShift, ShiftOptions
from kvshift.ops.arguments import Call
from kvshift.ops.boundaries import NO_ROW, ShiftPlan, sequence_of_positions
from kvshift.ops.cpu.kernel import Pool
from kvshift.ops.dispatch import ShiftPath, shift_path
from kvshift.ops.shift import shift_keys_values


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The layout of raw rows in the pages of a layer.

    Attributes:
        tokens: number of tokens in each page.
        rows: number of raw rows in each page.
        stride: distance between the raw rows of one page and those of the next, in rows.
        count: number of rows from the first raw row of the first page to the last raw row of the last page.
    """

    tokens: int
    rows: int
    stride: int
    count: int

    def row(self, slot: Tensor) -> Tensor:
        """Return the raw row for the token in a slot of the cache, counted from the first raw row of the first page."""
        return slot // self.tokens * self.stride + slot % self.tokens % self.rows


@dataclass
class PagedShiftMetadata:
    """Which raw rows a batch reads and writes; shared by all layers of a group. Building it needs no synchronization.

    The implementations of the shift see the rows of all pages as the state of one sequence, which they read at the
    rows of a plan.
    """

    sources: Tensor
    """(1, P, W) int32, the row of the pack or of the cache that each lag of each token reads, as in `ShiftPlan`."""
    stored_rows: Tensor
    """(P,) int32, the row of the cache in which each token is stored; -1 if it is not stored."""

    @property
    def num_tokens(self) -> int:
        """P, without the padding that a CUDA graph appends to the batch."""
        return len(self.stored_rows)

    @cached_property
    def plan(self) -> ShiftPlan:
        return ShiftPlan(self.sources, self.sources.new_empty(1, 0), None)

    @cached_property
    def is_stored(self) -> Tensor:
        """(P, 1) booleans, True for tokens that are stored."""
        return self.stored_rows[:, None] >= 0

    @cached_property
    def write_rows(self) -> Tensor:
        """(P,) the row to which each token is written; row 0, in vLLM's null block, for tokens that are not stored."""
        return self.stored_rows.clamp(min=0).long()

    @classmethod
    def from_batch(cls, batch: CommonAttentionMetadata, pages: Pages, window: int) -> Self:
        """Return the metadata of a batch.

        A token reads tokens of its own piece from the pack, and earlier ones from the cache. The exception is a token
        of a prefix hit that another piece of this batch stores: it is read from the pack as well.
        """
        num_tokens = int(batch.query_start_loc_cpu[batch.num_reqs])
        begins = batch.query_start_loc[: batch.num_reqs + 1]
        tokens, slots = begins.diff(), batch.slot_mapping[:num_tokens]
        index = torch.arange(num_tokens, device=slots.device)
        piece, lags = sequence_of_positions(begins, num_tokens), torch.arange(window, device=slots.device)

        # Only the last tokens of a piece or of a block are stored, as many as a ring has rows.
        is_stored = slots >= 0
        if batch.max_query_len > pages.rows:
            is_last_of_piece = index + pages.rows >= begins[1:][piece]
            is_stored &= is_last_of_piece | (slots % pages.tokens >= pages.tokens - pages.rows)

        # The W - 1 tokens before each piece, the newest first.
        before = (batch.seq_lens[: batch.num_reqs] - tokens)[:, None] - lags[1:]
        blocks = batch.block_table_tensor[: batch.num_reqs].gather(1, before.clamp(min=0) // pages.tokens)
        slots_before = blocks.long() * pages.tokens + before % pages.tokens
        rows_before = pages.row(slots_before) - pages.count
        if batch.num_reqs > 1:
            ordered, order = slots.sort()
            found = torch.searchsorted(ordered, slots_before).clamp(max=num_tokens - 1)
            rows_before = torch.where(ordered[found] == slots_before, order[found], rows_before)
        rows_before = torch.where(before >= 0, rows_before, NO_ROW)

        behind = (index - begins[piece])[:, None] - lags  # negative before the piece
        of_cache = rows_before[piece[:, None], (-1 - behind).clamp(min=0)]
        sources = torch.where(behind >= 0, index[:, None] - lags, of_cache).int()[None]
        return cls(sources=sources, stored_rows=torch.where(is_stored, pages.row(slots), -1).int())


@dataclass(frozen=True, kw_only=True)
class UniformBatch:
    """A batch whose pieces have equal lengths, as the tensors in which vLLM describes it, without any computation.

    vLLM reuses their memory for the next batch, and padding is recognizable because it has no slots. A launch that
    reads these tensors can therefore be captured in a CUDA graph.
    """

    tokens_each: int
    """Number of tokens in each piece; at most the number of raw rows in a page."""
    slots: Tensor
    """(P,) the slot of each token in the cache; -1 for none."""
    seq_lens: Tensor
    """(S,) number of tokens in each sequence up to the end of its piece; 0 for padding."""
    block_table: Tensor
    """(S, blocks) the numbers of the blocks of each sequence."""

    @classmethod
    def from_batch(cls, batch: CommonAttentionMetadata, pages: Pages) -> Self | None:
        """Return the batch with its padding; None if its pieces differ in length or are longer than the ring."""
        tokens, each, sequences = batch.num_actual_tokens, batch.max_query_len, batch.num_reqs
        if tokens != each * sequences or each > pages.rows:
            return None
        return cls(
            tokens_each=each,
            slots=batch.slot_mapping[:tokens],
            seq_lens=batch.seq_lens[:sequences],
            block_table=batch.block_table_tensor[:sequences],
        )


class PagedShift(KVShift):
    """The shift of this rank's KV heads, with its state in paged rows.

    Args:
        num_kv_heads: number of KV heads of all ranks together.
        head_size: D.
        options: options of the shift; queries cannot be shifted.
        attention: name of the attention layer that takes the shifted keys and values.
        prefix: name of this module in the model.
    """

    def __init__(self, num_kv_heads: int, head_size: int, options: ShiftOptions, attention: str, prefix: str) -> None:
        ranks = get_tensor_model_parallel_world_size()
        local_heads = max(1, num_kv_heads // ranks)
        super().__init__(local_heads, options)
        copies = max(1, ranks // num_kv_heads)  # ranks that hold the same head
        self.first_head = get_tensor_model_parallel_rank() // copies * local_heads
        self.num_kv_heads, self.head_size, self.attention, self.prefix = num_kv_heads, head_size, attention, prefix
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(False).fill_(torch.nan)  # of a quantized checkpoint, vLLM may load less than all
            set_weight_attrs(parameter, {"weight_loader": self.load_heads})
        config = get_current_vllm_config()
        self.dtype = config.model_config.dtype
        layers = config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"prefix must be unique, but two layers have {prefix!r}")
        layers[prefix] = self

    def load_heads(self, param: nn.Parameter, loaded: Tensor) -> None:
        """Load this rank's heads from the coefficients of all heads.

        When vLLM reloads weights, it first counts their elements, with parameters on the meta device. It finds the
        parameter among the arguments by the name `param`.
        """
        expected = (self.num_kv_heads, param.shape[1])
        if loaded.shape != expected:
            raise ValueError(
                f"coefficients of {self.prefix} must have the shape {expected}, one row for each KV head, got "
                f"{tuple(loaded.shape)} from the checkpoint"
            )
        if not loaded.isfinite().all():
            raise ValueError(f"coefficients of {self.prefix} must be finite; those of a run that diverged are not")
        param.data.copy_(loaded.narrow(0, self.first_head, param.shape[0]))
        if param.is_meta:
            return
        self.__dict__.pop("pool", None)
        before = self.__dict__.pop("weights", None)
        if before is not None:  # captured graphs read the weights at this address
            with torch.inference_mode():
                self.__dict__["weights"] = before.copy_(self.weights)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Refuse a way of vLLM's `reload_weights` that would change a parameter, but not the coefficients in use."""
        raise ValueError(f"is_checkpoint_format must be True to reload {target} of {self.prefix}")

    @cached_property
    def weights(self) -> Tensor:
        """(2 G, W) coefficients of the heads of k, then of v; those of a target without a shift are (1, 0, ...)."""
        in_force = self.coefficients()
        one = next(iter(in_force.values()))
        as_it_is = torch.eye(1, one.shape[1], device=one.device).expand_as(one)
        return torch.cat([in_force.get(target, as_it_is) for target in ("k", "v")])

    @cached_property
    def path(self) -> ShiftPath:
        """The implementation that computes the shift."""
        if not self.weights.isfinite().all():
            raise ValueError(f"the checkpoint must have the coefficients of {self.prefix}, but some were not loaded")
        kv = torch.empty(0, 1, 1, self.head_size, dtype=self.dtype, device=self.weights.device)
        path = shift_path(Call(None, kv, None, self.weights))
        if path == "reference":
            raise ValueError('KVSHIFT_BACKEND must not be "reference", which does not support a paged cache')
        return path

    @cached_property
    def pool(self) -> Pool | None:
        """The kernel for CPUs, if it computes the shift."""
        return Pool(self.weights, self.head_size, self.dtype) if self.path == "cpu" else None

    @cached_property
    def supports_uniform(self) -> bool:
        """Whether `shift_uniform` can be used: on a GPU, if it gives the results of `shift_batch`."""
        if self.path != "triton":
            return False
        from kvshift.integrations.vllm_plugin.decode_check import passes_decode_check

        return passes_decode_check(self)

    def shift_uniform(self, kv: Tensor, shifted: Tensor, rows: Tensor, batch: UniformBatch, pages: Pages) -> None:
        """Do the work of `shift_batch`, with the same arguments, in one launch and without synchronization."""
        heads, window = self.weights.shape
        decode_kernel()[(len(batch.seq_lens), heads)](
            shifted, kv, rows, self.weights, batch.slots, batch.seq_lens, batch.block_table,
            len(batch.slots), kv.stride(0), batch.block_table.stride(0), pages.stride,
            Q=batch.tokens_each, W=window, H=heads, D=self.head_size, TOKENS=pages.tokens, ROWS=pages.rows,
            BLOCK=1 << (self.head_size - 1).bit_length(), SCAN=256, num_warps=1,
        )  # fmt: skip

    def shift_batch(self, kv: Tensor, shifted: Tensor, rows: Tensor, metadata: PagedShiftMetadata) -> None:
        """Write shifted keys and values to `shifted`, and store raw ones in `rows`.

        Args:
            kv: (P, 2 G D) raw keys of all heads, then raw values.
            shifted: (P, 2 G D) output, contiguous.
            rows: raw rows of all pages, from the first row of the first page.
            metadata: the rows that the batch reads and writes.
        """
        if self.pool is not None:
            self.pool.shift(kv, shifted, rows.data_ptr(), len(rows), metadata.sources, metadata.stored_rows)
            return
        x, state = (numbers.view(1, -1, len(self.weights), self.head_size) for numbers in (kv, rows))
        call = Call(None, x, x, self.weights, None, state, state, max_rows=0)
        y, *_ = shift_keys_values(call._replace(**metadata.plan._asdict()))
        shifted.view_as(x).copy_(y)
        rows.index_copy_(0, metadata.write_rows, torch.where(metadata.is_stored, kv, 0))


@cache
def decode_kernel() -> Any:
    """Return the decoding kernel. Importing it requires Triton."""
    from kvshift.integrations.vllm_plugin.decode_kernel import decode

    return decode


@eager_break_during_capture
def kv_shift(kv: torch.Tensor, shifted: torch.Tensor, layer_name: str) -> None:
    """Write keys and values, shifted by the layer `layer_name`, to `shifted`; a custom operator, opaque to compilers.

    Like vLLM's attention, it writes to a tensor that the caller allocates. If it worked in place, compiled code would
    copy queries, keys and values around it, but the graphs on either side need the tensor at a fixed address.

    (The operator's schema is made from the annotations. If the decorator wraps the function, they are resolved in the
    globals of vLLM's module, which has `torch` but no `Tensor`.)
    """
    context = get_forward_context()
    shift: PagedShift = context.no_compile_layers[layer_name]
    metadata: PagedShiftMetadata | UniformBatch | None = None
    if context.attn_metadata is not None:
        metadata = context.attn_metadata[shift.attention].kv_shift
    if isinstance(metadata, UniformBatch):
        attention, tokens = context.no_compile_layers[shift.attention], len(metadata.slots)
        shift.shift_uniform(kv[:tokens], shifted[:tokens], attention.raw_rows(), metadata, attention.pages)
        return
    if kv.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{layer_name}: in a CUDA graph, all sequences must have equally many new tokens")
    if metadata is None:  # vLLM measures memory with a batch that has no sequences
        shifted.zero_()
        return
    attention = context.no_compile_layers[shift.attention]
    if shift.pool is not None:  # creating a tensor would take longer than the shift of a token
        shift.pool.shift(
            kv, shifted, attention.raw_rows_address(), attention.pages.count, metadata.sources, metadata.stored_rows
        )
        return
    tokens = metadata.num_tokens
    shift.shift_batch(kv[:tokens], shifted[:tokens], attention.raw_rows(), metadata)


def _kv_shift_fake(kv: torch.Tensor, shifted: torch.Tensor, layer_name: str) -> None:
    return


direct_register_custom_op("kv_shift", kv_shift, mutates_args=["shifted"], fake_impl=_kv_shift_fake)
