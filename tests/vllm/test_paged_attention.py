"""Pages with a tail: block sizes, CUDA graphs and metadata of vLLM's backends, and caches that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvshift.integrations.vllm_plugin.paged_attention import AttentionWithRawRows, with_raw_rows
from kvshift.integrations.vllm_plugin.paged_shift import PagedShift, PagedShiftMetadata, Pages, UniformBatch

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)
BACKENDS: list[Any] = [CPUAttentionBackend, FlashAttentionBackend, TritonAttentionBackend]


class OnlySmallBlocks(CPUAttentionBackend):
    """A backend whose kernel takes blocks of 16 or 32 tokens."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [16, 32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_are_of_64_tokens_where_nobody_chose(backend: type[AttentionBackend]) -> None:
    """With vLLM's default of 16 tokens on a GPU, raw keys and values would take one of 17 rows."""
    assert with_raw_rows(backend).get_preferred_block_size(16) == 64
    assert with_raw_rows(backend).get_preferred_block_size(128) == 128


def test_a_kernel_of_small_blocks_gets_those() -> None:
    assert with_raw_rows(OnlySmallBlocks).get_preferred_block_size(16) == 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_keeps_its_name_and_makes_its_metadata_anew(backend: type[AttentionBackend]) -> None:
    ours: Any = with_raw_rows(backend)
    assert with_raw_rows(backend) is ours  # vLLM groups layers by the class
    assert issubclass(ours, backend)
    assert ours.get_name() == backend.get_name()
    assert ours.full_cls_name() not in {one.full_cls_name() for one in [*BACKENDS, with_raw_rows(OnlySmallBlocks)]}
    builder = ours.get_builder_cls()
    assert issubclass(builder, backend.get_builder_cls())
    assert not builder.supports_update_block_table


@pytest.mark.parametrize(
    ("backend", "one_launch", "support"),
    [
        (FlashAttentionBackend, True, "UNIFORM_BATCH"),
        (TritonAttentionBackend, True, "UNIFORM_BATCH"),  # ALWAYS without the shift
        (FlashAttentionBackend, False, "NEVER"),
        (CPUAttentionBackend, True, "NEVER"),
    ],
)
def test_graphs_hold_uniform_batches_where_their_shift_is_one_launch(
    backend: type[AttentionBackend], one_launch: bool, support: str
) -> None:
    config: Any = config_with({"attention": SimpleNamespace(), "shift": a_shift(one_launch)})
    builder: Any = with_raw_rows(backend).get_builder_cls()
    assert builder.get_cudagraph_support(config, SPEC) is AttentionCGSupport[support]
    assert builder.get_varlen_cudagraph_max_query_len(config, SPEC) is None


def a_shift(one_launch: bool) -> PagedShift:
    shift = PagedShift.__new__(PagedShift)
    torch.nn.Module.__init__(shift)
    shift.supports_uniform = one_launch
    return shift


def config_with(layers: dict[str, Any]) -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


class OwnMetadata(AttentionMetadataBuilder):
    """A builder of metadata that hold nothing but the length of the prefix."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return SimpleNamespace(prefix=common_prefix_len)


class Backend(CPUAttentionBackend):
    """A backend with the builder `OwnMetadata`."""

    @staticmethod
    def get_builder_cls() -> Any:
        return OwnMetadata


def builder_for(pages: Pages, one_launch: bool = False) -> Any:
    layer = SimpleNamespace(num_raw_rows=pages.rows, shift_window=2, pages=pages)
    config = config_with({"layer": layer, "shift": a_shift(one_launch)})
    return with_raw_rows(Backend).get_builder_cls()(SPEC, ["layer"], config, torch.device("cpu"))


@pytest.fixture
def batch() -> Any:
    return SimpleNamespace(
        num_reqs=2,
        num_actual_tokens=2,
        max_query_len=1,
        query_start_loc=torch.tensor([0, 1, 2]),
        query_start_loc_cpu=torch.tensor([0, 1, 2]),
        slot_mapping=torch.tensor([5 * 32 + 3, 7 * 32]),
        seq_lens=torch.tensor([4, 33]),
        block_table_tensor=torch.tensor([[5, 0], [6, 7]]),
    )


PAGES = Pages(tokens=32, rows=1, stride=33, count=1_000)


def test_metadata_of_one_launch_are_the_tensors_of_the_batch(batch: Any) -> None:
    found = builder_for(PAGES, one_launch=True).build(0, batch).kv_shift
    assert isinstance(found, UniformBatch)
    for mine, given in ("slots", "slot_mapping"), ("seq_lens", "seq_lens"), ("block_table", "block_table_tensor"):
        assert getattr(found, mine).data_ptr() == getattr(batch, given).data_ptr()
    batch.num_actual_tokens, batch.max_query_len = 3, 2
    batch.query_start_loc = batch.query_start_loc_cpu = torch.tensor([0, 1, 3])
    batch.slot_mapping = torch.tensor([5 * 32 + 3, 6 * 32 + 31, 7 * 32])
    assert isinstance(builder_for(PAGES, one_launch=True).build(0, batch).kv_shift, PagedShiftMetadata)


def test_metadata_have_the_rows_beside_their_own(batch: Any) -> None:
    metadata = builder_for(PAGES).build(0, batch)
    assert metadata.prefix == 0
    assert metadata.kv_shift.stored_rows.tolist() == [5 * 33, 7 * 33]
    assert metadata.kv_shift.sources.tolist() == [[[0, 5 * 33 - 1_000], [1, 6 * 33 - 1_000]]]


def attention_of_pages(cache: torch.Tensor) -> Any:
    """Return the attention of a float32 model with one raw row per page, before the cache is bound."""
    attention: Any = AttentionWithRawRows.__new__(AttentionWithRawRows)
    torch.nn.Module.__init__(attention)
    attention.num_raw_rows, attention.layer_name, attention.raw_dtype = 1, "layer", torch.float32
    attention.kv_cache = cache
    return attention


def pages_of(dtype: torch.dtype, tail: int) -> torch.Tensor:
    """Return four pages of 32 tokens, with keys and values of 2 heads of size 16, and `tail` numbers behind them."""
    page = 2 * 32 * 32
    numbers = torch.zeros(4, page + tail, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
    return numbers.as_strided((4, 2, 32, 32), (page + tail, 32 * 32, 32, 1))


@pytest.mark.parametrize(
    ("dtype", "tail"),
    [(torch.float32, 0), (torch.float32, 32), (torch.float32, 72), (torch.float8_e4m3fn, 64), (torch.uint8, 260)],
)
def test_pages_without_room_for_whole_raw_rows_are_refused(dtype: torch.dtype, tail: int) -> None:
    """A row has 64 numbers. vLLM may change the request of a layer, for instance if it ignores a sliding window."""
    cache = pages_of(dtype, tail)
    expected = (
        rf"of layer must be whole rows of 64 numbers of torch.float32, .* with strides \({cache.stride(0)}, 1024,"
    )
    with pytest.raises(ValueError, match=expected):
        attention_of_pages(cache).bind_kv_cache(cache)


@pytest.mark.parametrize(("dtype", "tail"), [(torch.float32, 64), (torch.float8_e5m2, 256), (torch.uint8, 512)])
def test_raw_rows_lie_behind_the_tokens_of_each_page(dtype: torch.dtype, tail: int) -> None:
    """They have the dtype of the model, whatever the dtype of the cache."""
    cache = pages_of(dtype, tail)
    attention = attention_of_pages(cache)
    attention.bind_kv_cache(cache)
    rows, stride = attention.raw_rows(), attention.pages.stride
    assert rows.dtype == torch.float32
    assert rows.shape == (3 * stride + 1, 64)
    for page in range(4):
        rows[page * stride] = page + 1
    assert not cache.view(torch.uint8).any()  # nothing was written where tokens are
    tails = (
        torch.empty(0, dtype=torch.float32).set_(cache.untyped_storage()).view(4, -1)[:, -tail * dtype.itemsize // 4 :]
    )
    assert tails[:, :64].eq(torch.arange(1, 5)[:, None]).all()
