"""`kvshift export`: write a model as two programs, as a folder for mlx-lm, or as a folder for the hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from kvshift_lab.commands.export.comparison import compute, encode_prompts, require_finite
from kvshift_lab.commands.export.mlx_folder import MODEL_FILE, check_mlx, require_mlx, require_mlx_model, write_mlx
from kvshift_lab.commands.export.options import ExportOptions
from kvshift_lab.commands.export.programs import (
    check_programs,
    require_fixed_rotary,
    require_packages,
    write_programs,
)
from kvshift_lab.commands.export.remote_code import check_folder, require_known, write_code
from kvshift_lab.core.atomic import new_folder
from kvshift_lab.core.errors import LabError, RunFailedError, require_new
from kvshift_lab.core.messages import log
from kvshift_lab.run.loading import MODEL_FILE_ERRORS, load_as_saved

_log = partial(log, command="export")


def export(options: ExportOptions) -> None:
    """Write the model of `options.model` to `options.out`, with its tokenizer and generation config.

    The result is loaded again and compared with the model on a few prompts.
    The folder is created only if it is complete and computes the same.

    Raises:
        LabError: The model, its tokenizer or the folder cannot be used, or a package is missing (exit code 2).
        RunFailedError: The logits of the model are not finite, or the exported model cannot be written or computes
            different results (exit code 3).
    """
    options.check()
    require_new(options.out)
    if options.format == "mlx":
        require_mlx()
    elif not options.remote_code:
        require_packages(options.format)
    logging.disable_progress_bar()
    model, tokenizer, _ = load_as_saved(options.model, dtype=options.dtype, device="cpu", log=_log)
    if options.format == "onnx" and not options.remote_code and model.dtype == torch.bfloat16:
        raise LabError("dtype: ONNX Runtime does not compute in bfloat16, the dtype of the model: give --dtype float32")
    prompts = encode_prompts(tokenizer, model.config, options.model)
    require_known(model)
    if options.format == "mlx":
        require_mlx_model(model)
    elif not options.remote_code:
        require_fixed_rotary(model.config)

    with new_folder(options.out) as part:
        expected = compute(model, prompts)
        require_finite(expected, options.model)
        try:
            holds = _write(model, part, options)
            tokenizer.save_pretrained(part)
        except MODEL_FILE_ERRORS as error:
            what = "model" if options.remote_code or options.format == "mlx" else "programs"
            raise RunFailedError(f"the {what} cannot be written to {options.out.parent}: {error}") from error
        same = _compared(part, prompts, expected, options)
    _log(f"{options.out} holds a {type(model).__name__} {holds}")
    _log(f"on {len(prompts)} prompts, {same}")


def _write(model: Any, part: Path, options: ExportOptions) -> str:
    """Write the model to the folder `part`, and return a description of what it holds."""
    if options.remote_code:
        model.save_pretrained(part)
        return f"and {write_code(model, part).name}, which imports its classes from kvshift"
    if options.format == "mlx":
        write_mlx(model, part)
        return f"for mlx-lm, with its code, {MODEL_FILE}"
    write_programs(model, part, options.format)
    model.generation_config.save_pretrained(part)
    return f"as prefill.{options.format} and decode.{options.format}"


def _compared(part: Path, prompts: list[Tensor], expected: dict[str, Tensor], options: ExportOptions) -> str:
    """Compare the exported model with the original and describe their agreement; RunFailedError if they differ."""
    if options.remote_code:
        largest = check_folder(part, prompts, expected)
        same = "equal those" if largest == 0 else f"differ by at most {largest:.1e} from those"
        return f"single, left-padded and packed, its logits {same} of {options.model}, and it generates the same tokens"
    if options.format == "mlx":
        who, largest = "in mlx-lm,", check_mlx(part, prompts, expected)
    else:
        who, largest = "single and left-padded,", check_programs(part, options.format, prompts, expected)
    return f"{who} the greedy tokens equal those of {options.model}, and the logits differ by at most {largest:.1e}"
