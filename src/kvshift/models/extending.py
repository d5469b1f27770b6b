"""What another attention, decoder or model may build on: the seam for variants. Everything else may change any day.

Together with the public names of `kvshift`, `kvshift.models.llama`, `kvshift.models.retrofit` and
`kvshift.models.baichuan_m1`, a variant may rely on the following.

Attention, before the cache. The module `shift` of an attention may be replaced by any module that is called like
`KVShift.forward` and has `targets`: it gets raw queries, keys and values, and returns finished ones and the new
`ShiftState`. `shift_tokens` is `kv_shift` for one tensor, `lagged_tokens` gathers previous tokens for any other mixing,
and `norm_and_rotate` and `apply_rotary` do what follows the shift.

Attention, after the cache. `ShiftedAttention` is a base class of every family's attention, `KVShiftLlamaAttention` that
of the Llama. Override `project`, `attend` or `output`.

Decoder. Every family's decoder has `prepare_inputs(inputs_embeds, attention_mask, position_ids, cache, **named)`, which
returns masks and positions, and `run_layers(hidden_states, masks, **kwargs)`. `create_masks` creates the masks,
`create_token_masks` only those of tokens, for an attention that makes its own masks of pairs.

Cache of a call. `CACHE` is the name of the argument in the installed version of transformers, and
`resolve_cache_argument` reads it under either name. A layer of the cache has `shift_state`, `record_past` and
`write_shift`; `ShiftDynamicLayer` is such a layer of a `DynamicCache`.

Model. `ShiftedPreTrainedModel` is a mixin that initialises coefficients and keeps them in float32. `add_child` and
`register_model_class` change modules and classes of a finished model; `auto_class` is the Auto class of a model class.

Shapes: B batch, T positions of this call, R rows of state, H query heads, G heads, D head size, W window.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kvshift.models.cache import ShiftDynamicLayer
from kvshift.models.decoder import ShiftedAttention, ShiftedPreTrainedModel
from kvshift.models.documents import create_masks, create_token_masks
from kvshift.models.llama.modeling import KVShiftLlamaAttention
from kvshift.models.registration import auto_class
from kvshift.models.retrofit.family import add_child, register_model_class
from kvshift.models.versions import CACHE, resolve_cache_argument
from kvshift.ops import shift_tokens
from kvshift.ops.arguments import Norms
from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.boundaries import plan_shift
from kvshift.ops.rope import Rotary, apply_rotary
from kvshift.ops.torch_ops import gather_rows, state_after

__all__ = [
    "CACHE",
    "KVShiftLlamaAttention",
    "Norms",
    "Rotary",
    "ShiftDynamicLayer",
    "ShiftedAttention",
    "ShiftedPreTrainedModel",
    "add_child",
    "apply_rotary",
    "auto_class",
    "create_masks",
    "create_token_masks",
    "lagged_tokens",
    "norm_and_rotate",
    "register_model_class",
    "resolve_cache_argument",
    "shift_tokens",
]


def norm_and_rotate(
    q: Tensor, k: Tensor, *, rotary: Rotary | None = None, norms: Norms | None = None
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate queries (B, T, H, D) and keys (B, T, G, D) as `KVShift.forward` does after the shift.

    Args:
        rotary: tables of cos and sin; None for no rotary embedding.
        norms: modules for queries and keys; None for no norms.
    """
    q_out, k_out, _, _ = shift_norm_rope(q, k, k, None, None, rotary=rotary, norms=norms, keep_state=False)
    return cast(Tensor, q_out), k_out


def lagged_tokens(
    x: Tensor,
    rows: Tensor,
    window: int,
    *,
    max_rows: int,
    mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Gather x[t], x[t-1], ..., x[t-W+1] for every token, 0 where a document begins, by the rule of `kvshift.kv_shift`.

    Args:
        x: (B, T, G, D).
        rows: rows before x, newest last, (B, R, G, D) with R >= W - 1; zeros for a new sequence.
        window: W.
        max_rows: maximum number of rows to return.
        mask, seq_idx: (B, T), as in `kvshift.kv_shift`.
        dtype: dtype of the gathered tokens; None for that of x.

    Returns:
        W tensors like x, and the rows before the next token.
    """
    (batch, positions), past = x.shape[:2], rows.shape[1]
    plan = None
    if mask is not None or seq_idx is not None:
        plan = plan_shift(batch, positions, window, past, x.device, seq_idx=seq_idx, mask=mask)
    all_rows = torch.cat([rows, x], dim=1).to(x.dtype if dtype is None else dtype)
    lagged = [
        all_rows[:, past - lag : past - lag + positions]
        if plan is None
        else gather_rows(all_rows, plan.sources[:, :, lag] + past)
        for lag in range(window)
    ]
    return lagged, state_after(x, rows, plan, max_rows)
