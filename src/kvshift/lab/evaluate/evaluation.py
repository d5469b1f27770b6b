"""`kvshift eval`: how good a model is, by the one of three measures that its options ask for."""

from __future__ import annotations

from typing import Any

from kvshift.lab.evaluate.eval_config import EvalConfig

__all__ = ["evaluate"]


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """Print a table, and return what `config.output` then holds.

    See `score_text` (a text), `evaluate_tasks` (benchmarks: `config.tasks`) and `measure_repetition` (continuations:
    `config.repetition`).

    Raises:
        LabError: options, text, data or a model are not fit (exit code 2), or memory does not suffice (3).
    """
    config.check()
    if config.tasks:
        from kvshift.lab.evaluate.benchmarking import evaluate_tasks as measure
    elif config.repetition:
        from kvshift.lab.evaluate.continuations import measure_repetition as measure
    else:
        from kvshift.lab.evaluate.text_scores import score_text as measure
    return measure(config)
