"""The results of a model on a few prompts, and the comparison of an exported model with the original by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvshift_lab.core.errors import RunFailedError

_ROUNDING = 512  # tolerated difference, as a multiple of the largest logit's precision; at most 1/20 of that logit


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return prompts, each (T,), as one left-padded batch and its attention mask."""
    longest = max(len(prompt) for prompt in prompts)
    padded = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    return padded, torch.stack([torch.arange(longest) >= longest - len(prompt) for prompt in prompts]).long()


def compute(model: Any, prompts: list[Tensor]) -> dict[str, Tensor]:
    """Compute logits of prompts (T,), each alone, left-padded and packed; except packed, also 8 greedy tokens."""
    found, tokens = {}, {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    own = model.generation_config
    model.generation_config = type(own)()  # without end-of-text tokens
    with torch.no_grad():
        for i, prompt in enumerate(prompts):
            ids = prompt.unsqueeze(0)
            found[f"{i} logits"] = model(ids, use_cache=False).logits
            found[f"{i} tokens"] = model.generate(ids, attention_mask=torch.ones_like(ids), **tokens)
        padded, mask = left_padded(prompts)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
        found["padded logits"] = logits[mask.bool()]
        found["padded tokens"] = model.generate(padded, attention_mask=mask, **tokens)
        packed = torch.cat(prompts).unsqueeze(0)
        positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts]).unsqueeze(0)
        found["packed logits"] = model(packed, position_ids=positions, use_cache=False).logits
    model.generation_config = own
    return found


def largest_difference(expected: dict[str, Tensor], found: dict[str, Tensor], where: str) -> float:
    """Return the largest difference of logits and other numbers, after checking that the tokens are equal.

    Args:
        expected: Results of `compute`, or other tensors named "<prompt> <kind>".
        found: Results to compare with `expected`, under all or some of its names.
        where: Where `found` was computed, for messages.

    Raises:
        RunFailedError: Tokens differ, or numbers differ by more than rounding errors.
    """
    largest = 0.0
    for name, theirs in found.items():
        ours, which, kind = expected[name], name.split()[0], name.split()[-1]
        what = f"prompt {which}" if which.isdecimal() else f"the {which} prompts"
        if name.endswith("tokens"):
            if not torch.equal(ours, theirs):
                raise RunFailedError(
                    f"{where}, the continuation of {what} differed from the model's. Nothing was written"
                )
            continue
        difference = (ours.float() - theirs.float()).abs().max().item()
        most = min(_ROUNDING * torch.finfo(ours.dtype).eps, 0.05) * ours.float().abs().max().item()
        if not difference <= most:
            raise RunFailedError(
                f"{where}, the {kind} of {what} differed from the model's by {difference:.3g}, more than rounding "
                f"errors explain ({most:.3g}). Nothing was written"
            )
        largest = max(largest, difference)
    return largest
