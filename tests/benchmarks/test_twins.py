"""A model that is to run by one backend does so wherever its shift is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvshift.benchmarks.twins import shifting_by
from kvshift.layers import KVShift
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

CONFIG = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_every_call_takes_the_path_that_is_named(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, prefill, decoding and decoding with a static cache, whose one-token call is asked for everywhere."""
    asked: dict[str, set[str]] = {}
    for name in ("forward", "step"):

        def spy(name: str, whole: Callable) -> Callable:
            def call(self: KVShift, *given: Any, **options: Any) -> Any:
                asked.setdefault(name, set()).add(options.get("backend", "auto"))
                return whole(self, *given, **options)

            return call

        monkeypatch.setattr(KVShift, name, spy(name, getattr(KVShift, name)))
    model = shifting_by(backend, KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**CONFIG)))
    ids = torch.randint(1, 31, (2, 7), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    static = model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation="static")
    assert torch.equal(static, expected)
    assert asked == {"forward": {backend}, "step": {backend}}
    shifts: list[Any] = [part for part in model.modules() if isinstance(part, KVShift)]
    assert [shift.recomputing.keywords for shift in shifts] == [{"backend": backend}] * 2  # too small to be asked here
