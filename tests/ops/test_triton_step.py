"""One token of every sequence in one launch: the bits of the split of the whole, in place, and nothing beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.ops.triton.call import shift_norm_rope_triton, triton_refusal
from kvshift.ops.triton.step import step_triton

from .cases import normal_numbers

pytestmark = pytest.mark.interpreted

SLOTS = [4, -1, 0, 2, 1]  # of the states: sequence 1 only fills up the batch
CACHE_SLOTS = [3, 5, -1, 17, 9]  # in the cache, of 4 pages of 8 rows: sequence 2 is not written there


@pytest.fixture(autouse=True)
def kernels() -> None:
    refusal = triton_refusal(torch.empty(0), 2)
    if refusal is not None:
        pytest.skip(refusal)


@dataclass(frozen=True)
class Call:
    """Arguments of `step_triton` by name."""

    tensors: dict[str, Any]

    def run(self) -> Tensor:
        return step_triton(**self.tensors)

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def with_(self, **changes: Any) -> Call:
        return replace(self, tensors=self.tensors | changes)

    def copy(self) -> Call:
        return Call({name: x.clone() if isinstance(x, Tensor) else x for name, x in self.tensors.items()})


def a_call(
    *, window: int = 2, rows: int = 1, dtype: torch.dtype = torch.float32, norm: bool = False, tables: int = 1
) -> Call:
    """Five sequences, 5 query and 3 KV heads; the cache of keys has its heads before its positions."""
    normal = normal_numbers(2, dtype)
    scales = {"q_scale": normal(6), "k_scale": normal(6), "eps": 0.1} if norm else {}
    return Call(
        {
            "q": normal(5, 1, 5, 6),
            "k": normal(5, 1, 3, 6),
            "v": normal(5, 1, 3, 7),
            "alpha": normal(3, window),
            "beta": normal(3, window),
            "cos": normal(tables, 1, 3),
            "sin": normal(tables, 1, 3),
            "k_state": normal(8, rows, 3, 6),
            "v_state": normal(8, rows, 3, 7),
            "k_cache": normal(4, 3, 8, 6).transpose(1, 2),
            "v_cache": normal(4, 8, 3, 7),
            "state_slots": torch.tensor(SLOTS),
            "cache_slots": torch.tensor(CACHE_SLOTS),
            **scales,
        }
    )


OPTIONS = {
    "paper": {},
    "window 3, four rows": {"window": 3, "rows": 4},
    "norm, tables of each row": {"norm": True, "tables": 5},
    "bfloat16": {"dtype": torch.bfloat16, "norm": True},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_is_the_next_piece_of_each_sequence(options):
    call = a_call(**options)
    before, q_out = call.copy(), call.run()
    for b, (slot, cache_slot) in enumerate(zip(SLOTS, CACHE_SLOTS, strict=True)):
        if slot < 0:
            assert q_out[b].count_nonzero() == 0
            continue
        row, table = slice(b, b + 1), slice(b, b + 1) if before["cos"].shape[0] > 1 else slice(0, 1)
        q, k, v = shift_norm_rope_triton(
            before["q"][row],
            before["k"][row],
            before["v"][row],
            before["alpha"],
            before["beta"],
            before["cos"][table],
            before["sin"][table],
            k_state=before["k_state"][slot : slot + 1],
            v_state=before["v_state"][slot : slot + 1],
            **{name: before[name] for name in ("q_scale", "k_scale", "eps") if name in before.tensors},
        )
        assert torch.equal(q_out[row], q)
        for name, raw, new in (("k", before["k"], k), ("v", before["v"], v)):
            assert torch.equal(call[f"{name}_state"][slot], torch.cat([before[f"{name}_state"][slot, 1:], raw[b]]))
            if cache_slot >= 0:
                assert torch.equal(call[f"{name}_cache"][cache_slot // 8, cache_slot % 8], new[0, 0])


def test_a_step_writes_nothing_else():
    call = a_call(rows=2)
    before = call.copy()
    call.run()
    for name in ("k", "v"):
        others = [slot for slot in range(8) if slot not in SLOTS]
        assert torch.equal(call[f"{name}_state"][others], before[f"{name}_state"][others])
        unlike = (call[f"{name}_cache"] != before[f"{name}_cache"]).any(3).any(2)
        assert sorted(divmod(p, 8) for s, p in zip(SLOTS, CACHE_SLOTS, strict=True) if s >= 0 and p >= 0) == [
            tuple(cache_slot) for cache_slot in unlike.nonzero().tolist()
        ]
    for name in ("q", "k", "v", "alpha", "beta", "cos", "sin", "state_slots", "cache_slots"):
        assert torch.equal(call[name], before[name]), name


def test_pages_of_their_own_count_from_the_start_of_each():
    """As the static cache of transformers has it: one length for all sequences."""
    shape = {"k_cache": torch.zeros(5, 8, 3, 6), "v_cache": torch.zeros(5, 8, 3, 7)}
    own = a_call().with_(**shape, cache_slots=torch.tensor(3), own_pages=True)
    counted = own.with_(cache_slots=torch.arange(5) * 8 + 3, own_pages=False).copy()
    own.run()
    counted.run()
    for name in ("k_cache", "v_cache"):
        assert own[name].count_nonzero()
        assert torch.equal(own[name], counted[name])


def test_behind_the_end_of_its_page_a_token_is_written_nowhere():
    """Not into the page of the next sequence, nor, from the last, into memory of others; and nobody overlooks it."""
    pages = {"k_cache": torch.zeros(7, 8, 3, 6), "v_cache": torch.zeros(7, 8, 3, 7)}
    first_five = {name: x[:5] for name, x in pages.items()}
    call = a_call().with_(**first_five, state_slots=None, own_pages=True)
    assert call.with_(cache_slots=torch.tensor(8)).run().isnan().all()
    for name, x in pages.items():
        assert not x.any(), name
    assert call.with_(cache_slots=torch.tensor(7)).run().isfinite().all()


def test_sequences_have_the_state_of_their_number_by_default():
    call = a_call().with_(state_slots=None)
    counted = call.with_(state_slots=torch.arange(5)).copy()
    assert torch.equal(call.run(), counted.run())
    assert torch.equal(call["k_state"], counted["k_state"])
    assert torch.equal(call["v_cache"], counted["v_cache"])


@pytest.mark.parametrize("shifted", ["alpha", "beta", "neither"])
def test_what_is_not_shifted_is_rotated_and_stored_as_it_is(shifted):
    identity = torch.tensor([[1.0, 0.0]]).expand(3, 2)
    missing = {name: None for name in ("alpha", "beta") if name != shifted}
    call = a_call().with_(**missing)
    same = call.with_(**dict.fromkeys(missing, identity)).copy()
    assert torch.equal(call.run(), same.run())
    for name in ("k_cache", "v_cache", "k_state", "v_state"):
        assert torch.equal(call[name], same[name]), name


WRONG: dict[str, tuple[str, Any]] = {
    "q must be": ("q", torch.zeros(5, 2, 5, 6)),
    "k must be": ("k", torch.zeros(4, 1, 3, 6)),
    "v must be": ("v", torch.zeros(5, 2, 3, 7)),
    "k_state must be": ("k_state", torch.zeros(8, 0, 3, 6)),
    "v_state must be": ("v_state", torch.zeros(8, 1, 7, 3).transpose(2, 3)),
    "v_state must have as many": ("v_state", torch.zeros(9, 1, 3, 7)),
    "k_cache must be": ("k_cache", torch.zeros(4, 8, 6, 3).transpose(2, 3)),
    "v_cache must have": ("v_cache", torch.zeros(4, 9, 3, 7)),
    "cos must be": ("cos", torch.zeros(1, 1, 6)),
    "state_slots must be": ("state_slots", torch.zeros(4, dtype=torch.long)),
    "cache_slots must be": ("cache_slots", torch.zeros(4, dtype=torch.long)),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message):
    name, value = WRONG[message]
    with pytest.raises(ValueError, match=f"^{message}"):
        a_call().with_(**{name: value}).run()


@pytest.mark.slow
def test_the_operator_keeps_the_rules_of_torch_library():
    call = a_call(norm=True)
    arguments = [call[name] for name in ("q", "k", "v", "alpha", "beta", "cos", "sin", "k_state", "v_state")]
    caches = [call[name] for name in ("k_cache", "v_cache", "state_slots", "cache_slots")]
    torch.library.opcheck(
        torch.ops.kvshift.step.default, (*arguments, *caches, False, call["q_scale"], call["k_scale"], 0.1)
    )


def test_a_compiled_graph_changes_state_and_cache_too():
    call = a_call()
    eager = call.copy()
    compiled = torch.compile(lambda **tensors: step_triton(**tensors), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**call.tensors), eager.run())
    for name in ("k_cache", "v_cache", "k_state", "v_state"):
        assert torch.equal(call[name], eager[name]), name
