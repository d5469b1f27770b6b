"""`kvshift eval`: evaluate models on a text or on benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import logging

from kvshift_lab.commands.eval.options import EvalConfig
from kvshift_lab.core.atomic import write_json
from kvshift_lab.core.environment import environment
from kvshift_lab.core.errors import RunFailedError
from kvshift_lab.core.options import to_json
from kvshift_lab.run.loading import find_device


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """Run the evaluation, print its table and return the report, which is also written to `config.output`.

    The options select the measure: benchmarks with `config.tasks`, otherwise the loss on a text (`text_scores`).

    Raises:
        LabError: The options, text, data or a model cannot be used (exit code 2), or memory runs out (3).
    """
    config.check()
    if config.tasks:
        from kvshift_lab.commands.eval import benchmarks as measured
    else:
        from kvshift_lab.commands.eval import text_scores as measured
    device = find_device(config.device)
    logging.disable_progress_bar()
    try:
        report = measured.measure(config)
    except torch.OutOfMemoryError as error:
        window = "" if config.tasks else f" or window (now {config.window or 'the default'})"
        smaller = f"Give a smaller batch_size (now {config.batch_size}){window}"
        raise RunFailedError(f"out of memory: {error}. {smaller}") from error
    report |= {"options": to_json(config), "environment": environment(device, processes=1)}
    print("\n".join(measured.table(report)), flush=True)
    if config.output is not None:
        write_json(config.output, report)
    return report
