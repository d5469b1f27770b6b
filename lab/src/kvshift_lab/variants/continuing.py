"""Continue token sequences with `model.generate`, with padding, a seed and a check of the logits.

Shapes: N prompts, P tokens of the longest prompt, S continuations of each, L new tokens of the longest continuation.
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

from kvshift_lab.core.errors import RunFailedError
from kvshift_lab.variants.uncached import decodes_with_cache


def continue_rows(
    model: Any, prompts: Sequence[Tensor], generation_config: GenerationConfig, *, seed: int, **kwargs: Any
) -> Tensor:
    """Return the tokens that the model generates after each prompt, leaving torch's global generators unchanged.

    Prompts of unequal length are padded on the left; each is continued as it would be alone.

    Args:
        model: a model with `generate` that takes `input_ids` and `attention_mask`.
        prompts: a tensor (P,) int64 per prompt, P >= 1.
        generation_config: the complete generation settings, `pad_token_id` included. Only `use_cache` is replaced, by
            the result of `decodes_with_cache`.
        seed: random seed of the sampling.
        kwargs: further arguments of `model.generate`.

    Returns:
        (N S, L) int64. The S continuations of a prompt are consecutive rows, padded after their ends.

    Raises:
        RunFailedError: the logits of a next token are not finite.
    """
    generation_config = deepcopy(generation_config)
    generation_config.use_cache = decodes_with_cache(model)
    pad = cast(int, generation_config.pad_token_id)
    ids = pad_sequence(list(prompts), batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
    accelerators = [] if model.device.type == "cpu" else [model.device]
    with torch.random.fork_rng(accelerators, device_type=model.device.type if accelerators else "cuda"):
        torch.manual_seed(seed)
        written = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=generation_config,
            logits_processor=LogitsProcessorList([partial(_refuse_not_finite, dtype=model.dtype)]),
            **kwargs,
        )
    return written[:, ids.shape[1] :]


def _refuse_not_finite(ids: Tensor, scores: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Raise an error unless each row of scores (n, vocabulary) has a finite maximum; -inf marks an excluded token."""
    if not scores.amax(-1).isfinite().all():
        raise RunFailedError(
            f"model: its logits are not finite after {ids.shape[1]} tokens, so no next token can be chosen; "
            f"the range of {dtype} may be too small for its weights"
        )
    return scores
