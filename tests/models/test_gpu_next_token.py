"""The next token in one launch on a CUDA device: the kernel alone, and in models."""

from __future__ import annotations

from tests.ops.device import MARKS
from tests.ops.triton.test_next_token import (  # noqa: F401  # the last is a fixture
    test_a_zero_coefficient_reads_nothing,
    test_it_is_exact_but_for_rounding,
    test_nothing_is_written_beyond_the_end,
    test_tokens_one_after_another,
    test_what_it_does_not_take,
    test_without_shift_there_is_no_state,
)

from .test_next_token_launch import (  # noqa: F401
    launched,
    test_a_cache_that_grows_is_given_room,
    test_a_cuda_graph_decodes,
    test_a_static_cache_that_is_full_is_refused_by_name,
    test_families_agree_with_the_general_way,
    test_small_dtypes,
)

pytestmark = MARKS
