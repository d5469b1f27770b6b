"""Faults in how a model of any family handles the arguments of a call: several rows, padding, embeddings, chunks.

Each fault is a function `mutate(model, patch)` that puts it into one model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvshift.models import documents as module
from tests.models.faults import in_state

Patch = pytest.MonkeyPatch
Mutate = Callable[[PreTrainedModel, Patch], None]


def in_documents(change: Callable[[Tensor, Tensor | None], Tensor | None]) -> Mutate:
    """Return a fault that changes the documents (B, T) that shift and attention get, given which tokens are real."""

    def mutate(model: PreTrainedModel, patch: Patch) -> None:
        index = module.document_index

        def document_index(batch: int, positions: int, real: Tensor | None, **named: Any) -> Tensor | None:
            documents = index(batch, positions, real, **named)
            return None if documents is None else change(documents, real)

        patch.setattr(module, "document_index", document_index)

    return mutate


def _union(documents: Tensor, real: Tensor | None) -> Tensor:
    """Let a boundary in any row end the documents of all rows."""
    starts = nn.functional.pad(documents.diff(dim=1) != 0, (1, 0)).any(0, keepdim=True)
    return starts.expand_as(documents).cumsum(1)


def _first_row_alone(documents: Tensor, real: Tensor | None) -> Tensor:
    return torch.cat([documents[:1], torch.zeros_like(documents[1:])])


def _unless_padded_on(side: int) -> Callable[[Tensor, Tensor | None], Tensor]:
    def change(documents: Tensor, real: Tensor | None) -> Tensor:
        return documents if real is None else documents * real[:, side : side + 1 or None]

    return change


def documents_lost_after_the_first_call(model: PreTrainedModel, patch: Patch) -> None:
    """Hide the beginnings of documents from calls that continue a cache."""
    index = module.document_index
    seen = [0]

    def before(model: nn.Module, given: tuple, named: dict[str, Any]) -> None:
        cache = named.get("cache", named.get("past_key_values"))
        seen[0] = 0 if cache is None else int(cache.get_seq_length())

    patch.setattr(module, "document_index", lambda *a, **k: index(*a, **k) if seen[0] == 0 else None)
    model.base_model.register_forward_pre_hook(before, with_kwargs=True)


def in_embeds(
    change: Callable[[Tensor], Tensor], where: Callable[[dict[str, Any], Tensor], bool] = lambda named, x: True
) -> Mutate:
    """Return a fault that changes the embeddings (B, T, E) that a call receives."""

    def mutate(model: PreTrainedModel, patch: Patch) -> None:
        def before(model: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
            embeds = named.get("inputs_embeds")
            if embeds is None or not where(named, embeds):
                return None
            return given, {**named, "inputs_embeds": change(embeds)}

        model.base_model.register_forward_pre_hook(before, with_kwargs=True)

    return mutate


def _continues(named: dict[str, Any], x: Tensor) -> bool:
    cache = named.get("cache", named.get("past_key_values"))
    return cache is not None and int(cache.get_seq_length()) > 0


def embeds_without(name: str) -> Mutate:
    """Return a fault that drops another argument of calls that receive embeddings."""

    def mutate(model: PreTrainedModel, patch: Patch) -> None:
        def before(model: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
            return None if named.get("inputs_embeds") is None else (given, {**named, name: None})

        model.base_model.register_forward_pre_hook(before, with_kwargs=True)

    return mutate


SEVERAL = [f"documents: several rows{beside}" for beside in ("", ", seq_idx", ", cache")]
PADDED = [f"documents: padding{beside}" for beside in ("", ", seq_idx", ", cache")]
EMBEDS = ["inputs_embeds", *(f"inputs_embeds: {beside}" for beside in ("padding", "documents", "cache"))]
EMBEDDED = [*EMBEDS, "generate: inputs_embeds"]
CHUNKS = [
    f"cache: {name}" for name in ("without position_ids", "every split", "chunked prefill", "left padding", "static")
]
DRAFTS = ["generate: assisted", "generate: prompt lookup"]


def rows(several: tuple[str, int], padded: tuple[str, int]) -> dict[str, tuple[str, int] | None]:
    """Return the wrong properties, and where each begins, if all packs of several rows are wrong, padded or not."""
    return dict.fromkeys([*SEVERAL, *PADDED]) | {SEVERAL[0]: several, PADDED[0]: padded}


def embeds(place: int) -> dict[str, tuple[str, int] | None]:
    """Return the wrong properties, and where each begins, if embeddings are wrong from this position on."""
    return dict.fromkeys(EMBEDDED) | {"inputs_embeds": ("batch of 3", place), "inputs_embeds: documents": ("", place)}


# For each fault, exactly the properties that it must make wrong, and where it begins, if that matters: the case and the
# position. Sequences have up to 16 tokens, documents 3, 1, 5, 2 and 5 tokens, and rows 1 to 5 documents.
FAULTS: dict[str, tuple[Mutate, dict[str, tuple[str, int] | None]]] = {
    "documents of the first row": (
        in_documents(lambda documents, real: documents[:1].expand_as(documents)),
        rows(("3 rows, document 1", 2), ("left padding, document 1", 10)),
    ),
    "documents of the last row": (
        in_documents(lambda documents, real: documents[-1:].expand_as(documents)),
        rows(("3 rows, document 1", 3), ("left padding, document 0", 14)),
    ),
    "documents of all rows together": (
        in_documents(_union),
        rows(("3 rows, document 0", 2), ("left padding, document 0", 14)),
    ),
    "documents of the next row": (
        in_documents(lambda documents, real: documents.roll(1, 0)),
        rows(("3 rows, document 1", 3), ("left padding, document 0", 14)),
    ),
    "documents in the first row alone": (
        in_documents(_first_row_alone),
        rows(("3 rows, document 1", 2), ("left padding, document 1", 10)),
    ),
    "documents only if the first row has some": (
        in_documents(lambda documents, real: documents if bool(documents[0].any()) else None),
        {SEVERAL[0]: ("2 rows, document 1", 3), SEVERAL[1]: ("3 rows, document 1", 2)}
        | dict.fromkeys(PADDED[1:])
        | {PADDED[0]: ("left padding, document 1", 10)},
    ),
    "documents of one row alone": (
        in_documents(lambda documents, real: documents if len(documents) == 1 else None),
        rows(("3 rows, document 1", 3), ("left padding, document 1", 10)),
    ),
    "documents lost beside padding": (
        in_documents(lambda documents, real: documents if real is None else None),
        dict.fromkeys(PADDED) | {PADDED[0]: ("left padding, document 1", 10)},
    ),
    "documents lost in rows padded on the left": (
        in_documents(_unless_padded_on(0)),
        dict.fromkeys([PADDED[0], PADDED[2]], ("left padding, document 1", 10)),
    ),
    "documents lost in rows padded on the right": (
        in_documents(_unless_padded_on(-1)),
        dict.fromkeys(PADDED[:2], ("right padding, document 1", 3)),
    ),
    "documents lost after the first call": (
        documents_lost_after_the_first_call,
        {"documents: chunked prefill": ("document 1", 3)},
    ),
    "embeddings doubled": (in_embeds(lambda x: 2 * x), embeds(0)),
    "embeddings scaled by their width": (in_embeds(lambda x: x * x.shape[-1] ** 0.5), embeds(0)),
    "embeddings off by a hundredth": (in_embeds(lambda x: 1.01 * x), embeds(0)),
    "embeddings in half precision": (in_embeds(lambda x: x.bfloat16().to(x.dtype)), embeds(0)),
    "embeddings smeared": (
        in_embeds(lambda x: torch.cat([x[:, :1], x[:, 1:] + 0.1 * x[:, :-1]], dim=1)),
        embeds(1),
    ),
    "embeddings of the first row": (
        in_embeds(lambda x: x[:1].expand_as(x)),
        {name: begins for name, begins in embeds(0).items() if name != "inputs_embeds: documents"},
    ),
    "embeddings scaled beside a mask": (
        in_embeds(lambda x: 2 * x, lambda named, x: named.get("attention_mask") is not None),
        {
            "inputs_embeds: padding": ("left padding", 0),
            "inputs_embeds: cache": ("", 0),
            "generate: inputs_embeds": ("", 3),
        },
    ),
    "embeddings scaled beside tokens in a cache": (in_embeds(lambda x: 2 * x, _continues), {EMBEDS[3]: ("", 0)}),
    "embeddings of one token scaled": (
        in_embeds(lambda x: 2 * x, lambda named, x: x.shape[1] == 1),
        {"inputs_embeds": ("one token", 0), "inputs_embeds: cache": ("", 2)},
    ),
    "embeddings of prompts scaled": (in_embeds(lambda x: 2 * x, lambda named, x: x.shape[1] > 1), embeds(0)),
    "padding forgotten beside embeddings": (
        embeds_without("attention_mask"),
        {"inputs_embeds: padding": ("left padding", 0), "inputs_embeds: cache": ("", 0)},
    ),
    "documents forgotten beside embeddings": (
        embeds_without("position_ids"),
        {"inputs_embeds: documents": ("", 3), "inputs_embeds: cache": None, "generate: inputs_embeds": None},
    ),
    "state lost by every chunk": (
        lambda model, patch: in_state(lambda state, k, mask: state if k.shape[1] == 1 else None)(patch),
        dict.fromkeys([*CHUNKS, *DRAFTS])
        | {
            "documents: chunked prefill": ("document 0", 2),
            "cache: every split": ("split at 1", 1),
            "cache: chunked prefill": ("", 4),
            "generate: chunked prefill": ("", 8),
        },
    ),
}
NAMED = (  # run for every family, even without slow tests
    "documents of the first row",
    "documents lost beside padding",
    "embeddings scaled by their width",
    "state lost by every chunk",
)
