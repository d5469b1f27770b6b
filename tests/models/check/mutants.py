"""Faults in sound models, each with exactly the properties that it must make wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from kvshift import KVShift, ShiftState
from kvshift.models import decoder, documents
from kvshift.models.cache import ShiftCacheLayer, ShiftSlidingWindowLayer, StaticShiftCacheLayer
from kvshift.models.check import PROPERTIES

from ..llama.tiny import tiny_model

Patch = pytest.MonkeyPatch
write_shift = ShiftCacheLayer.write_shift


def in_state(change: Callable[[ShiftState, Tensor, Tensor | None], ShiftState | None]) -> Callable[[Patch], None]:
    """Return a mutant that changes the state a call with a cache continues, given its keys (B, T, G, D) and mask."""

    def mutant(patch: Patch) -> None:
        whole = ShiftCacheLayer.shift_tokens

        def shift_tokens(self: Any, shift: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            if self.shift_state is not None:
                self.shift_state = change(self.shift_state, k, options.get("mask"))
            return whole(self, shift, q, k, v, **options)

        patch.setattr(ShiftCacheLayer, "shift_tokens", shift_tokens)

    return mutant


def zeros_of(state: ShiftState) -> ShiftState:
    q = None if state.q is None else torch.zeros_like(state.q)
    return ShiftState(torch.zeros_like(state.k), torch.zeros_like(state.v), state.max_rows, q)


state_never_read = in_state(lambda state, k, mask: zeros_of(state))  # every call begins a sequence


def state_of_another_sequence(patch: Patch) -> None:
    def write(self: ShiftCacheLayer, state: ShiftState) -> None:
        write_shift(self, state.select(torch.arange(state.sequences).roll(1)))

    patch.setattr(ShiftCacheLayer, "write_shift", write)


def state_at_the_padded_end(patch: Patch) -> None:
    """Take the state from the last column, even if it is padding."""
    forward = KVShift.forward

    def shift(self: KVShift, q: Tensor, k: Tensor, v: Tensor, **where: Any) -> tuple:
        *shifted, state = forward(self, q, k, v, **where)
        if where.get("mask") is not None:
            state = ShiftState(k[:, -1:], v[:, -1:], 1)
        return *shifted, state

    patch.setattr(KVShift, "forward", shift)


def beams_without_state(patch: Patch) -> None:
    """Reorder the keys and values of beams without their states."""

    def stay(self: ShiftCacheLayer, indices: Tensor) -> None:
        state, n = self.shift_state, len(indices)
        if state is not None and n != state.sequences:
            self.shift_state = state.select([i % state.sequences for i in range(n)])

    patch.setattr(ShiftCacheLayer, "_select_shift", stay)
    patch.setattr(StaticShiftCacheLayer, "_select_shift", stay)


def rollback_keeps_the_newest_state(patch: Patch) -> None:
    patch.setattr(ShiftState, "crop", lambda self, tokens, *, window: self)


def static_state_not_reset(patch: Patch) -> None:
    """Let a static cache keep the raw keys and values of the previous sequence when it is reset."""
    reset = StaticShiftCacheLayer.reset

    def forgetful(self: Any) -> None:
        kept = self.shift_state.clone()
        reset(self)
        self._overwrite(self.shift_state, kept)

    patch.setattr(StaticShiftCacheLayer, "reset", forgetful)


def static_state_not_written(patch: Patch) -> None:
    patch.setattr(StaticShiftCacheLayer, "_overwrite", staticmethod(lambda kept, state: None))


def padding_ignored(patch: Patch) -> None:
    """Apply the mask in attention only."""
    patch.setattr(documents, "padding_mask", lambda attention_mask, positions: None)


def padding_of_the_first_columns(patch: Patch) -> None:
    """Take the first columns of the whole mask instead of the last ones."""
    patch.setattr(documents, "padding_mask", lambda mask, positions: None if mask is None else mask[:, :positions] != 0)


def documents_ignored(patch: Patch) -> None:
    patch.setattr(documents, "document_index", lambda *a, **k: None)


def documents_met_in_attention(patch: Patch) -> None:
    """Let attention cross the boundaries of documents; the shift stops there."""
    patch.setattr(documents, "same_document", lambda start, seen: lambda batch, head, query, key: key >= 0)


def documents_met_in_the_shift(patch: Patch) -> None:
    """Let the shift cross the boundaries of documents; attention stops there."""
    create = decoder.create_masks
    patch.setattr(decoder, "create_masks", lambda *a, **k: {**create(*a, **k), "documents": None})


def documents_met_beside_a_cache(patch: Patch) -> None:
    """Drop the boundaries of documents in calls with a cache, as transformers does."""
    create = decoder.create_masks

    def create_masks(config, inputs_embeds, attention_mask, past_key_values, position_ids, **named):
        given = {} if past_key_values is not None else {"position_ids": position_ids, **named}
        return create(config, inputs_embeds, attention_mask, past_key_values, given.pop("position_ids", None), **given)

    patch.setattr(decoder, "create_masks", create_masks)


def seq_idx_ignored(patch: Patch) -> None:
    index = documents.document_index

    def document_index(*given: Any, seq_idx: Tensor | None = None, **named: Any) -> Tensor | None:
        return index(*given, **named)

    patch.setattr(documents, "document_index", document_index)


def window_one_short(patch: Patch) -> None:
    """Let the cache of a sliding window keep one token too few."""
    make = ShiftSlidingWindowLayer.__init__

    def short(self: Any, window: int, **sizes: int) -> None:
        make(self, window, **{**sizes, "sliding_window": sizes["sliding_window"] - 1})

    patch.setattr(ShiftSlidingWindowLayer, "__init__", short)


def in_mlp(change: Callable[[Tensor, nn.Module], Tensor]) -> Callable[[Patch], None]:
    """Return a mutant that changes the input of each MLP, (B, T, E)."""

    def mutant(patch: Patch) -> None:
        forward = LlamaMLP.forward
        patch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, change(x, self)))

    return mutant


def _next_token(x: Tensor, _: nn.Module) -> Tensor:
    return torch.cat([x[:, :-1] + 0.1 * x[:, 1:], x[:, -1:]], dim=1)


def _gradient_alone(x: Tensor, _: nn.Module) -> Tensor:
    leak = torch.cat([x[:, 1:], x[:, -1:]], dim=1)
    return x + leak - leak.detach() if x.requires_grad else x


def _dropout(x: Tensor, _: nn.Module) -> Tensor:
    return nn.functional.dropout(x, 0.1, training=True)


def _mean_of_the_batch(x: Tensor, _: nn.Module) -> Tensor:
    return x + 0.1 * (x.mean(0, keepdim=True) - x) if len(x) > 1 else x


def _kept_from_the_last_call(x: Tensor, mlp: nn.Module) -> Tensor:
    before = getattr(mlp, "kept", 0.0)
    mlp.kept = x.detach().mean()
    return x + before


def sliding() -> PreTrainedModel:
    return tiny_model(sliding_window=8)


CACHED = [name for name in PROPERTIES if name.startswith("cache")]
GENERATED = [name for name in PROPERTIES if name.startswith("generate")]
CONTINUED = ["documents: several rows, cache", "documents: padding, cache"]
DOCUMENTS = [f"documents: position_ids{beside}" for beside in ("", ", mask", ", cache")]
ALL_DOCUMENTS = [name for name in PROPERTIES if name.startswith("documents")]
ROWS = {
    "documents: several rows": ("3 rows, document 1", 3),
    "documents: several rows, cache": ("3 rows, document 1", 3),
    "documents: padding": ("left padding, document 1", 10),
    "documents: padding, cache": ("left padding, document 1", 10),
    "documents: chunked prefill": ("document 1", 3),
}
BOUNDARIES = {
    **dict.fromkeys(ALL_DOCUMENTS, ("document 1", 3)),
    **ROWS,
    "documents: several rows, seq_idx": ("3 rows, document 1", 2),
    "documents: padding, seq_idx": ("right padding, document 1", 3),
    "documents: gradients": ("document 1", 0),
}

# For each mutant, exactly the properties that are wrong, and where it begins, if that matters: the case and the
# position. Sequences have up to 16 tokens, documents 3, 1, 5, 2 and 5 tokens.
MUTANTS: dict[str, tuple[Callable[[Patch], None], dict[str, tuple[str, int] | None]]] = {
    "state never read": (
        state_never_read,
        dict.fromkeys([*CONTINUED, "documents: chunked prefill", *CACHED, *GENERATED])
        | {
            "documents: position_ids, cache": ("token 1 after the pack", 16),
            "cache: token by token": ("", 1),
            "cache: every split": ("split at 1", 1),
        },
    ),
    "state of another sequence": (
        state_of_another_sequence,
        dict.fromkeys(["cache: chunked prefill", "generate: inputs_embeds", "generate: chunked prefill"])
        | {
            "documents: several rows, cache": ("3 rows, token 1 after the pack", 16),
            "documents: padding, cache": ("left padding, token 1 after the pack", 16),
            "cache: batch": ("", 3),
            "cache: left padding": ("split at 1", 1),
            "cache: right padding": ("token 1 after the prompt", 3),
            "generate: left padding": ("", 4),
            "generate: beams": ("tokens of the beams", 7),  # sorting the beams rolls the state once more
        },
    ),
    "state at the padded end": (
        state_at_the_padded_end,
        dict.fromkeys(["cache: chunked prefill", "generate: chunked prefill"])
        | {"cache: left padding": ("split at 1", 0), "cache: right padding": ("token 1 after the prompt", 3)},
    ),
    "beams without state": (beams_without_state, {"generate: beams": ("tokens of the beams", 7)}),
    "rollback keeps the newest state": (
        rollback_keeps_the_newest_state,
        {"generate: assisted": ("", 9), "generate: prompt lookup": ("", 11)},
    ),
    "static state not reset": (static_state_not_reset, {"cache: static": ("after reset", 0)}),
    "static state not written": (
        static_state_not_written,
        {"cache: static": ("static cache", 9), "generate: static cache": ("first prompts", 10)},
    ),
    "padding ignored": (
        padding_ignored,
        dict.fromkeys(["cache: chunked prefill", "generate: chunked prefill"])
        | {
            "left padding: mask alone": ("batch of 4", 0),
            "cache: left padding": ("split at 8", 0),
            "cache: right padding": ("token 1 after the prompt", 3),
        },
    ),
    "padding of the first columns": (
        padding_of_the_first_columns,
        dict.fromkeys(["cache: chunked prefill", "generate: inputs_embeds", "generate: chunked prefill"])
        | {
            "documents: padding, cache": ("left padding, token 1 after the pack", 16),
            "cache: left padding": ("split at 1", 0),
            "generate: left padding": ("", 4),
        },
    ),
    "documents ignored": (
        documents_ignored,
        BOUNDARIES | dict.fromkeys([name for name in ALL_DOCUMENTS if name.endswith(("seq_idx", "cu_seq_lens"))]),
    ),
    "documents met in attention": (
        documents_met_in_attention,
        BOUNDARIES,
    ),
    "documents met in the shift": (
        documents_met_in_the_shift,
        BOUNDARIES,
    ),
    "documents met beside a cache": (
        documents_met_beside_a_cache,
        {name: begins for name, begins in BOUNDARIES.items() if name.endswith(("cache", "chunked prefill"))},
    ),
    "window one short": (
        window_one_short,
        dict.fromkeys([CONTINUED[0], *(name for name in [*CACHED, *GENERATED] if "static" not in name)])
        | {"cache: token by token": ("", 7), "cache: every split": ("split at 7", 7)},
    ),
    "next token seen": (
        in_mlp(_next_token),
        dict.fromkeys([*ALL_DOCUMENTS, *CACHED, *GENERATED, "right padding"]) | {"causality": ("position 0", 1)},
    ),
    "next token in gradients alone": (
        in_mlp(_gradient_alone),
        {"causality": ("position 0", 1), "documents: gradients": ("document 0", 3)},
    ),
    "dropout left on": (in_mlp(_dropout), dict.fromkeys([]) | {"same bits twice": ("at once", 0)}),
    "mean of the batch": (
        in_mlp(_mean_of_the_batch),
        dict.fromkeys(
            [
                "batch",
                "left padding",
                "left padding: mask alone",
                "right padding",
                *(name for name in ROWS if "rows" in name or "padding" in name),
                "documents: several rows, seq_idx",
                "documents: padding, seq_idx",
                *CACHED[3:],
                "generate: left padding",
                "generate: inputs_embeds",
                "generate: chunked prefill",
                "generate: beams",
                "generate: static cache",
            ]
        )
        | {"batch": ("", 0)},
    ),
    "state kept in the module": (in_mlp(_kept_from_the_last_call), {"same bits twice": ("at once", 0)}),
}
CHANGES_EVERYTHING = ("dropout left on", "state kept in the module")  # no two calls give the same results
