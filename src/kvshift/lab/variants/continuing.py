"""Continue sequences of tokens: what stands around each call of `model.generate`.

Shapes: N prompts, P tokens of the longest, S continuations of each, L new tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList

from kvshift.lab.core.errors import RunFailedError
from kvshift.lab.variants.uncached import decodes_with_cache


def continue_rows(model: Any, prompts: Sequence[Tensor], how: GenerationConfig, *, seed: int, **kwargs: Any) -> Tensor:
    """What the model writes after each prompt; torch's own generators are left as they were.

    Prompts of unequal length are padded on the left; each is continued as it would be alone.

    Args:
        model: from `input_ids` and `attention_mask`, with `generate`.
        prompts: (P,) int64 each, P >= 1.
        how: all of it, its `pad_token_id` too; but for `use_cache`, which is as `decodes_with_cache` says.
        seed: of what is drawn.
        kwargs: for `model.generate`.

    Returns:
        (N S, L) int64, the S of one prompt one after the other; behind the end of a sequence stands padding.

    Raises:
        RunFailedError: the logits of a next token are not finite.
    """
    how = deepcopy(how)
    how.use_cache = decodes_with_cache(model)
    pad = cast(int, how.pad_token_id)
    ids = pad_sequence(list(prompts), batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
    accelerators = [] if model.device.type == "cpu" else [model.device]
    with torch.random.fork_rng(accelerators, device_type=model.device.type if accelerators else "cuda"):
        torch.manual_seed(seed)
        written = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=how,
            logits_processor=LogitsProcessorList([partial(_refuse_not_finite, dtype=model.dtype)]),
            **kwargs,
        )
    return written[:, ids.shape[1] :]


def _refuse_not_finite(ids: Tensor, scores: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Of (n, vocabulary) scores; -inf is a token that is ruled out, and a token must be left."""
    if not scores.amax(-1).isfinite().all():
        raise RunFailedError(
            f"model: its logits are not finite after {ids.shape[1]} tokens, so no next token can be chosen; "
            f"the range of {dtype} may be too small for its weights"
        )
    return scores
