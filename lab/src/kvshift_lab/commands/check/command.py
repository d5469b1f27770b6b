"""`kvshift check`: loads a model from a folder or the hub, checks it, and prints a table of the results."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvshift_lab.analysis.tables import as_text
from kvshift_lab.check import PROPERTIES, Report, check_model
from kvshift_lab.check.suite import report_with_environment
from kvshift_lab.commands.check.options import CheckConfig
from kvshift_lab.core.atomic import write_json
from kvshift_lab.core.errors import CheckFailedError, LabError, nearest
from kvshift_lab.core.messages import log, no_log
from kvshift_lab.data.hub import is_hub_name, require_on_hub
from kvshift_lab.run.loading import load_tokenizer, load_weights
from kvshift_lab.run.model_files import locate, model_folder
from kvshift_lab.variants.model_config import DType

_log = partial(log, command="check")

_HALF = (torch.bfloat16, torch.float16)


def check(config: CheckConfig) -> None:
    """Check a model and print the results.

    Raises:
        LabError: if options are wrong or the model cannot be checked.
        CheckFailedError: if a property is wrong, after the table and JSON have been written.
    """
    config.check()
    for name in config.properties:
        if name not in PROPERTIES:
            raise LabError(f"properties: there is no property {name!r}; {nearest(name, PROPERTIES)}")
    model, tokenizer, notes = _load(config)
    try:
        report = check_model(
            model,
            tokenizer,
            properties=config.properties or None,
            length=config.length,
            dtype=None if config.dtype == "auto" else getattr(torch, config.dtype),
            seed=config.seed,
            log=lambda verdict: _log(f"{verdict.property}: {verdict.verdict}"),
        )
    except (TypeError, ValueError) as error:
        raise LabError(str(error)) from error
    report = replace(report, notes=notes + report.notes)
    found = report_with_environment(report, model.device)
    print(json.dumps(found, indent=1, allow_nan=False) if config.json else report_table(report))
    if config.output is not None:
        write_json(config.output, found)
    if report.wrong:
        names = "; ".join(verdict.property for verdict in report.wrong)
        raise CheckFailedError(f"{len(report.wrong)} of {len(report.verdicts)} properties are wrong: {names}")


def report_table(report: Report) -> str:
    """Return the table for the terminal, followed by the tolerance and notes."""
    rows = [("property", "verdict", "error", "")]
    for verdict in report.verdicts:
        error = "" if verdict.error is None else f"{verdict.error:.1e}"
        rows.append((verdict.property, verdict.verdict, error, verdict.detail))
    head = (
        f"{report.model} ({report.model_type}), {report.dtype} on {report.device}, {report.attn_implementation}; "
        f"transformers {report.versions['transformers']}, torch {report.versions['torch']}"
    )
    below = (
        f"Spread of the logits over the vocabulary: {report.spread:.2g}. Effect of rounding: {report.noise:.1e}. "
        f"Errors above {report.tolerance:.1e} are wrong."
    )
    return "\n".join([head, "", as_text(rows, left=None), "", below, *report.notes])


def _load(config: CheckConfig) -> tuple[Any, Any, list[str]]:
    """Return the model, its tokenizer if it has one, and notes."""
    if is_hub_name(config.model):
        require_on_hub(config.model, "model")
        folder = config.model
    else:
        folder = str(model_folder(config.model, _log))
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    dtype: DType = "auto" if config.dtype == "float64" else config.dtype
    try:
        model = load_weights(folder, dtype=dtype, device=config.device, **options)
    except ImportError as error:
        raise LabError(f"model: {folder} could not be loaded: {str(error).strip().splitlines()[0]}") from error
    notes = []
    if config.dtype == "auto" and model.dtype in _HALF:
        notes.append(f"checked in float32; the model is saved in {str(model.dtype).removeprefix('torch.')}")
        model = model.float()
    elif config.dtype == "float64":
        model = model.double()
    try:
        _, where = locate(config.model, no_log)
    except LabError:  # no tokenizer: the configuration has the special tokens
        return model, None, notes
    return model, load_tokenizer(where), notes
