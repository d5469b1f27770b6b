"""A model that is set to one backend uses it in every call of its shift."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvshift import KVShift
from tests.models.llama.tiny import random_tokens, tiny_model

from .scripts import script

use_backend = script("exact").use_backend


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_every_call_takes_the_path_that_is_named(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds in training, prefill and decoding with both caches."""
    asked: set[str] = set()

    def spy(self: KVShift, *given: Any, whole: Callable = KVShift.forward, **options: Any) -> Any:
        asked.add(options.get("backend", "auto"))
        return whole(self, *given, **options)

    monkeypatch.setattr(KVShift, "forward", spy)
    model = use_backend(backend, tiny_model())
    ids = random_tokens(2, 7)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    static = model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation="static")
    assert torch.equal(static, expected)
    assert asked == {backend}
