"""Refusal of models in tests marked `no_models`, so that no other version of transformers can change their results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def models_refused() -> Iterator[None]:
    """Make the models, tokenizers and trainers of transformers raise when they are created."""
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise AssertionError(
            f"a {type(self).__name__} is made by a test marked no_models, which `make test-oldest` leaves out"
        )

    with pytest.MonkeyPatch.context() as patch:
        for kind in (PreTrainedModel, PreTrainedTokenizerBase, Trainer):
            patch.setattr(kind, "__init__", refuse)
        yield
