"""`kvshift eval MODEL --tasks ...`: evaluate one or more models on the same benchmark questions through lm-eval."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kvshift_lab.analysis.tables import as_text
from kvshift_lab.commands.eval.answer_cache import AnswerCache, open_answer_cache
from kvshift_lab.commands.eval.benchmarks import BENCHMARKS, select
from kvshift_lab.commands.eval.items import HUB, Questions, find_data, read_questions
from kvshift_lab.commands.eval.options import EvalConfig
from kvshift_lab.commands.eval.task_scores import average, compare, compare_averages, scores
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.messages import log, quiet
from kvshift_lab.run.inputs import identify_model
from kvshift_lab.run.loading import load_model
from kvshift_lab.run.model_files import locate

_log = partial(log, command="eval")

BenchmarkResults = dict[str, list[dict[str, Any]]]  # benchmark name -> one result per question


def measure(config: EvalConfig) -> dict[str, Any]:
    """Evaluate each model on the benchmarks of `config.tasks`, and return the report.

    "models" holds a score with its standard error for each task. "differences" holds the result of `compare` for the
    first model minus each other model. Answers are saved beside `config.output`, and an interrupted command resumes
    from them.

    Raises:
        LabError: The options, data or a model cannot be used (exit code 2), or memory runs out (3).
    """
    names = select(config.tasks)
    data = find_data(config.data)
    models = [config.model, *config.against]
    for model in models:  # report a missing model before hours of work
        locate(model, quiet)
    questions = {source: read_questions(source, data) for source in {BENCHMARKS[name].source for name in names}}
    with open_answer_cache(config.output) as cache:
        found, sources = zip(
            *(_evaluate_model(model, names, questions, config, cache) for model in models), strict=True
        )
    results = [
        {"name": model, "source": source, "tasks": {name: scores(name, items) for name, items in theirs.items()}}
        for model, source, theirs in zip(models, sources, found, strict=True)
    ]
    for result in results:
        result["average"] = average(result["tasks"])
    return {
        "data": data,
        "chance": {name: _chance(name, questions, config.limit) for name in names},
        "models": results,
        "differences": [
            _difference(models[0], found[0], other, theirs) for other, theirs in zip(models[1:], found[1:], strict=True)
        ],
    }


def _evaluate_model(
    name: str, tasks: list[str], questions: dict[str, Questions], config: EvalConfig, cache: AnswerCache
) -> tuple[BenchmarkResults, str]:
    from kvshift_lab.commands.eval.harness import (  # imports lm-eval, which takes seconds
        CachedModel,
        evaluate_benchmark,
        wrap_for_lm_eval,
    )

    model, tokenizer, source = load_model(name, dtype=config.dtype, device=config.device, log=_log)
    wrapped = wrap_for_lm_eval(model, tokenizer, batch_size=config.batch_size, window=config.window)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or wrapped.max_length
    if wrapped.max_length > longest:
        raise LabError(f"window must be at most {longest}, the longest context of {name}, got {config.window}")
    key = f"{identify_model(source, tokenizer.name_or_path)} {wrapped.max_length} {model.dtype}"
    answers = CachedModel(wrapped, cache, source=key, log=_log)
    found: BenchmarkResults = {}
    for task in tasks:
        _log(f"{name}: {task}")
        found[task] = evaluate_benchmark(answers, task, questions[BENCHMARKS[task].source], config.limit)
        _report_truncated_prompts(task, found[task], wrapped.max_length)
    return found, source


def _report_truncated_prompts(task: str, found: list[dict[str, Any]], window: int) -> None:
    few = sum(item["shots"] < BENCHMARKS[task].shots for item in found)
    cut = sum(not item["whole"] for item in found)
    if few:
        _log(
            f"{task}: to fit into {window} tokens, {few:,} of {len(found):,} prompts got fewer examples, and {cut:,} "
            "of them also lost their beginning"
        )
    elif cut:
        _log(f"{task}: to fit into {window} tokens, {cut:,} of {len(found):,} prompts lost their beginning")


def _chance(name: str, questions: dict[str, Questions], limit: int | None) -> float:
    """Return the expected score of random guessing: 0 for benchmarks without answers to choose from."""
    benchmark = BENCHMARKS[name]
    if benchmark.kind in ("word", "solution"):
        return 0.0
    return float(np.mean([1 / len(item.answers) for item in questions[benchmark.source].tests[:limit]]))


def _difference(model: str, ours: BenchmarkResults, other: str, theirs: BenchmarkResults) -> dict[str, Any]:
    right = [
        {name: np.array([item[BENCHMARKS[name].metric] for item in items]) for name, items in found.items()}
        for found in (ours, theirs)
    ]
    tasks = {name: compare(right[0][name], right[1][name]) for name in ours}
    return {"name": model, "minus": other, "tasks": tasks, "average": compare_averages(*right)}


def table(report: dict[str, Any]) -> list[str]:
    """Format the report for the terminal, as a list of lines."""
    models, chance = report["models"], report["chance"]
    rows = [("task", "items", "chance", *(model["name"] for model in models))]
    for task, expected in chance.items():
        found = [model["tasks"][task] for model in models]
        rows.append((task, f"{found[0]['items']:,}", f"{100 * expected:.1f}", *map(_percent, found)))
    if models[0]["average"] is not None:
        rows.append(("average of the eight", "", "", *(_percent(model["average"]) for model in models)))
    lines = [as_text(rows)]
    for difference in report["differences"]:
        rows = [("task", "difference", "95 % interval", "only first", "only second", "McNemar's p")]
        for task, found in difference["tasks"].items():
            counts = (f"{found['only_first']:,}", f"{found['only_second']:,}", f"{found['p']:.2g}")
            rows.append((task, *_points(found), *counts))
        if difference["average"] is not None:
            rows.append(("average of the eight", *_points(difference["average"]), "", "", ""))
        lines += ["", f"{difference['name']} minus {difference['minus']}, percentage points", as_text(rows)]
    where = "the hub" if report["data"] == HUB else report["data"]
    return [*lines, "", f"percent correct, ± one standard error; questions from {where}"]


def _percent(found: dict[str, Any]) -> str:
    error = "" if found["stderr"] is None else f" ± {100 * found['stderr']:.2f}"
    return f"{100 * found['score']:.2f}{error}"


def _points(found: dict[str, Any]) -> tuple[str, str]:
    difference, low, high = (f"{100 * found[name]:+.2f}" for name in ("difference", "low", "high"))
    return difference, f"{low} to {high}"
