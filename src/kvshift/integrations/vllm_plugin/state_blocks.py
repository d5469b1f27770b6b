"""Which blocks the raw keys and values of a sequence take from vLLM's pool.

A shift reads the W - 1 tokens before those of a step, and they stand in one block, or in two. So of all tokens of a
prompt only the last ones get blocks, and those before a position at which another request may continue from the prefix
cache; all others get the null block, in which nothing is written. vLLM's own sliding window would take blocks for every
token of a step, as many as attention itself while a prompt is computed, and set that many aside for each request
(vllm-project/vllm#54703).

Shapes: W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request


class ShiftStateManager(SlidingWindowManager):
    """Allocates blocks for what later steps may read. Between two calls of vLLM's scheduler for a request:

    `get_num_blocks_to_allocate`, `allocate_new_blocks`, `cache_blocks`.
    """

    def __init__(self, kv_cache_spec: SlidingWindowSpec, **options: Any) -> None:
        super().__init__(kv_cache_spec, **options)
        self.new_blocks: tuple[str, list[KVCacheBlock]] = ("", [])  # of the last request, as its worker is told them
        self.released: dict[str, int] = {}  # by request, how many of its first blocks are given back

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        held = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        new = cdiv(num_tokens, self.block_size) - max(held, self._first_read(num_tokens_main_model))
        return max(new, 0) + self._get_num_evictable_blocks(new_computed_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        blocks = self.req_to_blocks[request_id]
        new = max(cdiv(num_tokens, self.block_size) - len(blocks), 0)
        unread = min(max(self._first_read(num_tokens_main_model) - len(blocks), 0), new)
        new_blocks = [self._null_block] * unread + self.block_pool.get_new_blocks(new - unread)
        self.new_blocks = request_id, new_blocks
        blocks.extend(new_blocks)
        return new_blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Blocks of this step that the prefix cache is to keep are taken now, if any are free."""
        blocks = self.req_to_blocks[request.request_id]
        name, new_blocks = self.new_blocks
        self.new_blocks = "", []
        if name != request.request_id:
            new_blocks = []
        end, first_new = num_tokens // self.block_size, len(blocks) - len(new_blocks)
        start = max(self.num_cached_block.get(request.request_id, 0), first_new)
        boundaries = [*replay_boundaries, *([request.shared_prefix_boundary] if request.shared_prefix_boundary else [])]
        kept = self.reachable_block_mask(
            start_block=start,
            end_block=max(start, end),
            alignment_tokens=self.cache_hit_alignment_tokens,
            kv_cache_spec=self.kv_cache_spec,
            use_eagle=self.use_eagle,
            retention_interval=retention_interval,
            reachable_boundaries=boundaries,
        )
        for i in range(start, end):
            is_kept = kept is None or kept[i - start]
            if is_kept and blocks[i].is_null and self.block_pool.get_num_free_blocks() > 0:
                blocks[i] = new_blocks[i - first_new] = self.block_pool.get_new_blocks(1)[0]
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)

    def _first_read(self, num_tokens: int) -> int:
        """The first block that is read or written once so many tokens of a request are computed."""
        return self.get_num_skipped_tokens(num_tokens) // self.block_size

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        """Null blocks stand between others here."""
        blocks = self.req_to_blocks.get(request_id, [])
        last_block = min(last_block, len(blocks))
        removed = range(max(first_block, self.released.get(request_id, 0)), last_block)
        freed = [blocks[i] for i in reversed(removed) if not blocks[i].is_null]
        for i in removed:
            blocks[i] = self._null_block
        self.released[request_id] = last_block
        if freed:
            self.block_pool.free_blocks(freed)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self.released.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)


@dataclass(frozen=True, kw_only=True)
class ShiftStateSpec(SlidingWindowSpec):
    """Raw keys and values of the tokens of a block.

    `extra_retained_tokens` is by how many tokens a request may be taken back when drafts are rejected.
    """

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """What one request holds at most: what it reads, and what each of the steps in flight leaves to read."""
        tokens = self.sliding_window - 1 + self.extra_retained_tokens
        blocks = (1 + vllm_config.max_concurrent_batches) * (cdiv(tokens - 1, self.block_size) + 1)
        return min(blocks, cdiv(vllm_config.model_config.max_model_len, self.block_size) + 1) * self.page_size_bytes


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # vLLM registers its own only as long as there are none
KVCacheSpecRegistry.register(ShiftStateSpec, ShiftStateManager, SlidingWindowSpec)
