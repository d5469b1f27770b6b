"""`kvshift retrofit`: add KV shift to a pretrained model without changing its outputs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from kvshift import ShiftOptions
from kvshift.models.retrofit import add_kv_shift
from kvshift_lab.commands.export.comparison import (
    NEW_TOKENS,
    compute,
    encode_prompts,
    largest_difference,
    require_finite,
)
from kvshift_lab.commands.retrofit.options import RetrofitOptions
from kvshift_lab.core.atomic import new_folder
from kvshift_lab.core.errors import LabError, RunFailedError, require_new
from kvshift_lab.core.messages import log
from kvshift_lab.run.loading import MODEL_FILE_ERRORS, load_as_saved, load_weights

_log = partial(log, command="retrofit")


def retrofit(options: RetrofitOptions) -> None:
    """Write the model of `options.model` with a shift to `options.out`, with its tokenizer and generation config.

    The new model is loaded again and its outputs must be bitwise equal to those of the original: the logits of
    a few prompts and 8 greedily generated tokens for each. Only then is the folder created, completely.

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
    prompts = encode_prompts(tokenizer, model.config, options.model)
    before = compute(model, prompts, together=False)
    require_finite(before, options.model)
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
        after = compute(load_weights(part, device="cpu"), prompts, together=False)
        difference = largest_difference(before, after, "with the shift")
        if difference:
            raise RunFailedError(
                f"with the shift, logits of {options.model} differ by up to {difference:.3g}. Nothing was written"
            )
    _log(f"{out} contains a {name} with {added:,} coefficients, initialised to the identity")
    _log(
        f"on {len(prompts)} prompts with {sum(map(len, prompts))} tokens in total, its outputs are bitwise equal to "
        f"those of {options.model}: the logits, and {NEW_TOKENS} tokens generated after each prompt"
    )


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except MODEL_FILE_ERRORS as error:
        raise RunFailedError(f"the model cannot be written to {folder.parent}: {error}") from error
