"""The shift of one layer, whose state lies in the pages of vLLM's KV cache.

vLLM runs a batch as one pack of pieces of sequences: a whole prompt, a chunk of one, one token, or a token and drafts
that may be rejected. A page of the cache has, behind shifted keys and values of its block of tokens, a few rows of raw
ones: a ring, in which token t of the block has row t % rows. Only the last tokens of a block are ever read from it, so
a row or two are enough; with drafts, which may be taken back, there are as many more. A piece continues from the rows
of the tokens before its first. So one path serves prefill, chunks, decoding, hits in the prefix cache, preemption and
rejected drafts, and a block that is shared, freed or found again brings its raw keys and values with it.

On a GPU, pieces of one length, as in decoding, have a path of their own: one launch, which CUDA graphs may hold.

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
from kvshift.ops.boundaries import ShiftPlan, plan_shift
from kvshift.ops.cpu.kernel import shift_cpu
from kvshift.ops.dispatch import ShiftPath, shift_path
from kvshift.ops.shift import shift_keys_values


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Where raw rows lie in the pages of a layer.

    Attributes:
        tokens: of a page.
        rows: raw ones of a page.
        stride: from those of a page to those of the next, counted in rows.
    """

    tokens: int
    rows: int
    stride: int


@dataclass
class PagedShiftMetadata:
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

    @classmethod
    def of(cls, batch: CommonAttentionMetadata, pages: Pages, lags: Tensor) -> Self:
        """Of a batch.

        Args:
            lags: (W - 1,) how far before a piece its state begins: 1 - W ... -1.
        """
        num_tokens = int(batch.query_start_loc_cpu[batch.num_reqs])
        cu_seqlens = batch.query_start_loc[: batch.num_reqs + 1]
        tokens = cu_seqlens.diff()

        # A row is written by the last token of a piece or of a block that has its place in the ring.
        slots = batch.slot_mapping[:num_tokens]
        stored = slots >= 0
        if batch.max_query_len > pages.rows:
            ends = torch.repeat_interleave(cu_seqlens[1:], tokens, output_size=num_tokens)
            is_last_of_piece = torch.arange(pages.rows, num_tokens + pages.rows, device=slots.device) >= ends
            stored &= is_last_of_piece | (slots % pages.tokens >= pages.tokens - pages.rows)
        if not stored.is_cpu:
            slots, stored = torch.where(stored, slots, 0), stored[:, None]  # vLLM's null block
        elif stored.all():
            stored = None
        else:
            stored = stored.nonzero()[:, 0]
            slots = slots[stored]

        first = (batch.seq_lens[: batch.num_reqs] - tokens)[:, None]  # position of the first token of each piece
        before = first + lags
        began, before = before >= 0, before.clamp(min=0)
        in_table = before // pages.tokens
        blocks = batch.block_table_tensor[: batch.num_reqs].gather(1, in_table)
        return cls(
            num_tokens=num_tokens,
            one_token_each=batch.max_query_len == 1 and num_tokens == batch.num_reqs,
            cu_seqlens=cu_seqlens,
            stored=stored,
            own=slots // pages.tokens * pages.stride + slots % pages.tokens % pages.rows,
            before=(blocks * pages.stride + before % pages.tokens % pages.rows).flatten(),
            began=began.view(-1, 1),
            same_block=(in_table == first // pages.tokens).view(-1, 1),
        )


@dataclass(frozen=True, kw_only=True)
class UniformBatch:
    """A batch whose pieces are of one length, in the tensors in which vLLM describes it; nothing is computed of them.

    They are where those of the next batch will be, and padding says so itself: it has no slots. So a launch that reads
    them may lie in a CUDA graph.
    """

    tokens_each: int
    """Of a piece; no more than there are raw rows in a page."""
    slots: Tensor
    """(P,) where each token's keys and values go in the cache; -1 for nowhere."""
    seq_lens: Tensor
    """(S,) tokens of each sequence up to the end of its piece; 0 for padding."""
    block_table: Tensor
    """(S, blocks) of each sequence."""

    @classmethod
    def of(cls, batch: CommonAttentionMetadata, pages: Pages) -> Self | None:
        """Of a batch, with what it is padded with; None where its pieces differ, or are longer than the ring."""
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
    """The shift of this rank's KV heads, from and to paged rows.

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
        self.num_kv_heads, self.head_size, self.attention, self.prefix = num_kv_heads, head_size, attention, prefix
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(False)
            set_weight_attrs(parameter, {"weight_loader": self.load_heads})
        config = get_current_vllm_config()
        self.dtype = config.model_config.dtype
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
        if not loaded.isfinite().all():
            raise ValueError(f"coefficients of {self.prefix} must be finite, as those of a run that diverged are not")
        parameter.data.copy_(loaded.narrow(0, self.first_head, parameter.shape[0]))
        self.__dict__.pop("weights_of_numbers", None)
        before = self.__dict__.pop("weights", None)
        if before is not None:  # graphs that hold them read them where they are
            with torch.inference_mode():
                self.__dict__["weights"] = before.copy_(self.weights)

    @cached_property
    def weights(self) -> Tensor:
        """(2 G, W) coefficients of k's heads and of v's; what is not shifted is taken as it is."""
        in_force = self.coefficients()
        one = next(iter(in_force.values()))
        as_it_is = torch.eye(1, one.shape[1], device=one.device).expand_as(one)
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
        kv = torch.empty(0, 1, 1, self.head_size, dtype=self.dtype, device=self.weights.device)
        return shift_path(Call(None, kv, None, self.weights))

    @cached_property
    def takes_uniform(self) -> bool:
        """Whether `shift_uniform` can be had: on a GPU, where it computes what `shift_batch` does."""
        if self.path != "triton":
            return False
        from kvshift.integrations.vllm_plugin.decode_check import passes_decode_check

        return passes_decode_check(self)

    def shift_uniform(self, kv: Tensor, shifted: Tensor, rows: Tensor, batch: UniformBatch, pages: Pages) -> None:
        """`shift_batch` in one launch, without a look at numbers of the device. Arguments: see there."""
        heads, window = self.weights.shape
        decode_kernel()[(len(batch.seq_lens), heads)](
            shifted, kv, rows, self.weights, batch.slots, batch.seq_lens, batch.block_table,
            len(batch.slots), kv.stride(0), batch.block_table.stride(0), pages.stride,
            Q=batch.tokens_each, W=window, H=heads, D=self.head_size, TOKENS=pages.tokens, ROWS=pages.rows,
            BLOCK=1 << (self.head_size - 1).bit_length(), SCAN=256, num_warps=1,
        )  # fmt: skip

    def shift_batch(self, kv: Tensor, shifted: Tensor, rows: Tensor, metadata: PagedShiftMetadata) -> None:
        """Write shifted keys and values.

        Args:
            kv: (P, 2 G D) raw ones: the keys of all heads, then the values.
            shifted: (P, 2 G D) dense, to be written.
            rows: raw ones of all pages, from the first of the first page.
        """
        stored, before = metadata.stored, metadata.before
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
            torch.addcmul(torch.mul(kv, now), state, last, out=shifted)
            return
        heads, lags = self.weights.shape[0], self.weights.shape[1] - 1
        x, state = kv.view(1, -1, heads, self.head_size), state.view(-1, lags, heads, self.head_size)
        if self.path == "cpu":
            y = shift_cpu(x, self.weights, state, metadata.plan)
        else:
            call = Call(None, x, x, self.weights, None, state, state, cu_seqlens=metadata.cu_seqlens, max_rows=0)
            y, *_ = shift_keys_values(call._replace(**metadata.plan._asdict()))
        shifted.view_as(x).copy_(y)


@cache
def decode_kernel() -> Any:
    """Importing it takes Triton."""
    from kvshift.integrations.vllm_plugin.decode_kernel import decode

    return decode


@eager_break_during_capture
def kv_shift(kv: torch.Tensor, shifted: torch.Tensor, layer_name: str) -> None:
    """Write keys and values shifted by the layer of that name; an operator, so that compilers do not look inside.

    Like vLLM's attention it writes a tensor made for it: in place, compiled code would copy queries, keys and values
    around it, and graphs on either side need that tensor where it was.

    (The annotations make the operator's schema. Where the decorator wraps the function, they are looked up among the
    globals of vLLM's module, which has `torch` and no `Tensor`.)
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
        raise RuntimeError(f"{layer_name}: a CUDA graph can hold the shift of pieces of one length alone")
    if metadata is None:  # vLLM measures memory: there are no sequences
        shifted.zero_()
        return
    rows, tokens = context.no_compile_layers[shift.attention].raw_rows(), metadata.num_tokens
    shift.shift_batch(kv[:tokens], shifted[:tokens], rows, metadata)


def _kv_shift_fake(kv: torch.Tensor, shifted: torch.Tensor, layer_name: str) -> None:
    return


direct_register_custom_op("kv_shift", kv_shift, mutates_args=["shifted"], fake_impl=_kv_shift_fake)
