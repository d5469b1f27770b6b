"""`kvshift retrofit`: add KV shift to a pretrained model without changing its outputs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from kvshift import ShiftOptions
from kvshift.models.retrofit import add_kv_shift
from kvshift_lab.commands.retrofit.options import RetrofitOptions
from kvshift_lab.core.atomic import new_folder
from kvshift_lab.core.errors import LabError, RunFailedError, require_new
from kvshift_lab.core.messages import log
from kvshift_lab.run.loading import MODEL_FILE_ERRORS, load_as_saved, load_weights

_log = partial(log, command="retrofit")

# Prompts of different lengths; their content does not matter.
PROMPTS = (
    "The capital of France is",
    "1 2 3 4 5 6 7 8",
    "def add(a, b):\n    return",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of",
)
_NEW_TOKENS = 8

Outputs = dict[str, tuple[Tensor, Tensor]]  # logits and generated tokens, by prompt


def retrofit(options: RetrofitOptions) -> None:
    """Write the model of `options.model` with a shift to `options.out`, with its tokenizer and generation config.

    The new model is loaded again and its outputs must be bitwise equal to those of the original: the logits of
    `PROMPTS` and 8 greedily generated tokens for each. Only then is the folder created, completely.

    Raises:
        LabError: the model, its tokenizer or the folder is invalid (exit code 2).
        RunFailedError: the original model's logits are not finite, the new model's outputs differ, or the new model
            could not be written (3).
    """
    options.check()
    out = options.out
    require_new(out)
    logging.disable_progress_bar()
    model, tokenizer, _ = load_as_saved(options.model, dtype=options.dtype, device="cpu", log=_log)
    prompts = encode_prompts(tokenizer, options.model)
    before = _outputs(model, prompts)
    require_finite({prompt: logits for prompt, (logits, _) in before.items()}, options.model)
    try:
        shift = ShiftOptions(
            targets=options.shift_targets,
            window=options.shift_window,
            constraint=options.shift_constraint,
            init="identity",
        )
        add_kv_shift(model, shift)
    except ValueError as error:
        raise LabError(str(error)) from error

    with new_folder(out) as part:
        added = sum(p.numel() for name, p in model.named_parameters() if ".shift." in name)
        name = type(model).__name__
        _write(model, tokenizer, part)
        del model  # frees memory for loading the new model
        _compare(before, _outputs(load_weights(part, device="cpu"), prompts), options.model)
    _log(f"{out} contains a {name} with {added:,} coefficients, initialised to the identity")
    tokens = sum(ids.shape[1] for ids in prompts.values())
    _log(
        f"on {len(prompts)} prompts with {tokens} tokens in total, its outputs are bitwise equal to those of "
        f"{options.model}: the logits, and {_NEW_TOKENS} tokens generated after each prompt"
    )


def encode_prompts(tokenizer: Any, name: str) -> dict[str, Tensor]:
    """Return the token ids of `PROMPTS`, (1, T), by prompt. Prompts without tokens are left out.

    Raises:
        LabError: the tokenizer yields no tokens for any prompt. `name` is the model's name for the message.
    """
    encoded = {prompt: torch.tensor([tokenizer(prompt)["input_ids"]]).long() for prompt in PROMPTS}
    prompts = {prompt: ids for prompt, ids in encoded.items() if ids.numel()}
    if not prompts:
        raise LabError(f"model: the tokenizer of {name} returns no tokens for any of the test prompts")
    return prompts


def require_finite(logits: dict[str, Tensor], name: str) -> None:
    """Raise a RunFailedError if the logits of a model are not finite, and so cannot be compared with its copy's.

    Args:
        logits: logits by prompt or other input.
        name: name of the model.
    """
    for what, values in logits.items():
        if not values.isfinite().all():
            raise RunFailedError(f"model: the logits of {name} are not finite ({what!r}); nothing was written")


def _outputs(model: Any, prompts: dict[str, Tensor]) -> Outputs:
    """Return the logits of each prompt, and the prompt with its greedy continuation."""
    options: dict[str, Any] = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False}
    settings = model.generation_config
    options |= {"pad_token_id": settings.pad_token_id or 0, "num_beams": 1}
    found = {}
    with torch.no_grad():
        for prompt, ids in prompts.items():
            generated = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            found[prompt] = model(ids, use_cache=False).logits, generated
    return found


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except MODEL_FILE_ERRORS as error:
        raise RunFailedError(f"the model cannot be written to {folder.parent}: {error}") from error


def _compare(before: Outputs, after: Outputs, name: str) -> None:
    for prompt, old in before.items():
        new = after[prompt]
        if not all(torch.equal(one, other) for one, other in zip(old, new, strict=True)):
            difference = (new[0].float() - old[0].float()).abs().max().item()
            raise RunFailedError(
                f"with the shift, {name} has different outputs for {prompt!r}: its logits differ by up to "
                f"{difference:.3g}. Nothing was written"
            )
