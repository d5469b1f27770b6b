"""The results of a model on a few prompts, and the comparison of an exported model with the original by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvshift_lab.core.errors import LabError, RunFailedError

# Prompts of different lengths; their content does not matter.
_PROMPTS = (
    "The capital of France is",
    "1 2 3 4 5 6 7 8",
    "def add(a, b):\n    return",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of",
)
NEW_TOKENS = 8
_ROUNDING = 512  # tolerated difference, as a multiple of the largest logit's precision; at most 1/20 of that logit


def encode_prompts(tokenizer: Any, config: Any, name: str) -> list[Tensor]:
    """Return the token ids (T,) of a few prompts, cut so that the model can continue them by `NEW_TOKENS` tokens.

    Prompts without tokens are left out.

    Args:
        tokenizer: Tokenizer of the model.
        config: Configuration of the model.
        name: Name of the model for messages.

    Raises:
        LabError: No prompt has a token.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    most = None if positions is None else max(positions - NEW_TOKENS, 0)
    prompts = [torch.tensor(tokenizer(prompt)["input_ids"][:most]).long() for prompt in _PROMPTS]
    prompts = [ids for ids in prompts if len(ids)]
    if not prompts:
        if most == 0:
            raise LabError(f"model: {name} must have more than {NEW_TOKENS} positions, got {positions}")
        raise LabError(f"model: the tokenizer of {name} returns no tokens for any of the test prompts")
    return prompts


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return prompts, each (T,), as one left-padded batch and its attention mask."""
    longest = max(len(prompt) for prompt in prompts)
    padded = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    return padded, torch.stack([torch.arange(longest) >= longest - len(prompt) for prompt in prompts]).long()


def compute(model: Any, prompts: list[Tensor], *, together: bool = True) -> dict[str, Tensor]:
    """Compute logits of prompts (T,), each alone, left-padded and packed; except packed, also greedy tokens.

    Args:
        model: The model; its generation settings are ignored.
        prompts: Prompts of any lengths.
        together: Whether to compute them left-padded and packed too; some models of transformers take no position_ids.
    """
    found, tokens = {}, {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    own = model.generation_config
    model.generation_config = type(own)()  # without end-of-text tokens
    with torch.no_grad():
        for i, prompt in enumerate(prompts):
            ids = prompt.unsqueeze(0)
            found[f"{i} logits"] = model(ids, use_cache=False).logits
            found[f"{i} tokens"] = model.generate(ids, attention_mask=torch.ones_like(ids), **tokens)
        if together:
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


def require_finite(results: dict[str, Tensor], name: str) -> None:
    """Raise a RunFailedError if logits of a model are not finite, and so cannot be compared with its copy's.

    Args:
        results: Results of `compute`.
        name: Name of the model.
    """
    for what, values in results.items():
        if not values.isfinite().all():
            raise RunFailedError(f"model: the logits of {name} are not finite ({what!r}); nothing was written")


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
