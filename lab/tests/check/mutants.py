"""Faults in sound models, each with exactly the properties that it must make wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from kvshift_lab.check import PROPERTIES
from tests.models import faults
from tests.models.faults import Patch
from tests.models.llama.tiny import tiny_model


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
        faults.state_never_read,
        dict.fromkeys([*CONTINUED, "documents: chunked prefill", *CACHED, *GENERATED])
        | {
            "documents: position_ids, cache": ("token 1 after the pack", 16),
            "cache: token by token": ("", 1),
            "cache: every split": ("split at 1", 1),
        },
    ),
    "state of another sequence": (
        faults.state_of_another_sequence,
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
        faults.state_at_the_padded_end,
        dict.fromkeys(["cache: chunked prefill", "generate: chunked prefill"])
        | {"cache: left padding": ("split at 1", 0), "cache: right padding": ("token 1 after the prompt", 3)},
    ),
    "beams without state": (faults.beams_without_state, {"generate: beams": ("tokens of the beams", 7)}),
    "rollback keeps the newest state": (
        faults.rollback_keeps_the_newest_state,
        {"generate: assisted": ("", 9), "generate: prompt lookup": ("", 11)},
    ),
    "static state not reset": (faults.static_state_not_reset, {"cache: static": ("after reset", 0)}),
    "static state not written": (
        faults.static_state_not_written,
        {"cache: static": ("static cache", 9), "generate: static cache": ("first prompts", 10)},
    ),
    "padding ignored": (
        faults.padding_ignored,
        dict.fromkeys(["cache: chunked prefill", "generate: chunked prefill"])
        | {
            "left padding: mask alone": ("batch of 4", 0),
            "cache: left padding": ("split at 8", 0),
            "cache: right padding": ("token 1 after the prompt", 3),
        },
    ),
    "padding of the first columns": (
        faults.padding_of_the_first_columns,
        dict.fromkeys(["cache: chunked prefill", "generate: inputs_embeds", "generate: chunked prefill"])
        | {
            "documents: padding, cache": ("left padding, token 1 after the pack", 16),
            "cache: left padding": ("split at 1", 0),
            "generate: left padding": ("", 4),
        },
    ),
    "documents ignored": (
        faults.documents_ignored,
        BOUNDARIES | dict.fromkeys([name for name in ALL_DOCUMENTS if name.endswith(("seq_idx", "cu_seq_lens"))]),
    ),
    "documents met in attention": (
        faults.documents_met_in_attention,
        BOUNDARIES,
    ),
    "documents met in the shift": (
        faults.documents_met_in_the_shift,
        BOUNDARIES,
    ),
    "documents met beside a cache": (
        faults.documents_met_beside_a_cache,
        {name: begins for name, begins in BOUNDARIES.items() if name.endswith(("cache", "chunked prefill"))},
    ),
    "window one short": (
        faults.window_one_short,
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
