"""Tests marked `no_models` make nothing of transformers, so that another version of it cannot change what they find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def models_refused() -> Iterator[None]:
    """Models, tokenizers and trainers of transformers raise when they are made."""
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise AssertionError(
            f"a {type(self).__name__} is made by a test marked no_models, which `make test-oldest` leaves out"
        )

    with pytest.MonkeyPatch.context() as patch:
        for kind in (PreTrainedModel, PreTrainedTokenizerBase, Trainer):
            patch.setattr(kind, "__init__", refuse)
        yield
