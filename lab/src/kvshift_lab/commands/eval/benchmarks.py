"""`kvshift eval MODEL --tasks ...`: evaluate one or more models on the same benchmark questions through lm-eval.

The tasks are lm-eval's own: a YAML file each in `tasks/`, with prompts and metrics. The first metric of a file is the
score.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvshift_lab.analysis.tables import as_text
from kvshift_lab.commands.eval.options import EvalConfig
from kvshift_lab.core.errors import LabError, RunFailedError, install_command, nearest
from kvshift_lab.core.messages import log, no_log
from kvshift_lab.core.statistics import mean_of
from kvshift_lab.data.config import SHARED_DATA_ENV
from kvshift_lab.run.inputs import identify_model
from kvshift_lab.run.loading import load_model, num_appended_tokens
from kvshift_lab.run.model_files import locate
from kvshift_lab.variants.uncached import decodes_with_cache

try:
    from lm_eval.api.model import CachingLM
    from lm_eval.evaluator import evaluate as run_tasks
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ModuleNotFoundError as error:
    missing = (error.name or "lm_eval").partition(".")[0]
    raise LabError(f"tasks: needs the package {missing!r}: {install_command('eval')}") from error

_log = partial(log, command="eval")
_HFLM: Any = HFLM  # its decorator hides its type
logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about every model that it did not load itself

TASKS = Path(__file__).with_name("tasks")
PAPER = ("lambada", "winogrande", "hellaswag", "arc_easy", "arc_challenge", "cmmlu", "mmlu", "math")
"""The benchmarks of Table 2 of the paper; its average is their unweighted mean."""

_GROUPS = {"paper": PAPER, "table14": ("mmlu_cloze", "mmlu_zero", "mmlu")}
_RESAMPLES = 10_000

Samples = Sequence[Mapping[str, Any]]  # lm-eval's record of each question, with the value of each metric


class LMEvalModel(_HFLM):
    """lm-eval's model for transformers: variants that support no cache generate without, long answers are refused."""

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        generate = self.model.generate
        self.model.generate = lambda *args, **given: generate(
            *args, **given | {"use_cache": decodes_with_cache(self.model)}
        )
        try:
            return super()._model_generate(context, max_length, stop, **kwargs)
        finally:
            self.model.generate = generate

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> Any:
        (_, answer), _, tokens = max(requests, key=lambda request: len(request[2]))
        if len(tokens) > self.max_length:
            raise LabError(f"window must be at least {len(tokens)}, the length of the answer {answer!r:.60}")
        return super()._loglikelihood_tokens(requests, *args, **kwargs)


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
        locate(model, no_log)
    tasks = load_tasks(names, data)
    found, sources = zip(*(_answers(model, tasks, config) for model in models), strict=True)
    results = [
        {"name": model, "source": source, "tasks": {name: scores(tasks[name], theirs[name]) for name in names}}
        for model, source, theirs in zip(models, sources, found, strict=True)
    ]
    for result in results:
        result["average"] = average(result["tasks"])
    return {
        "data": data,
        "chance": {name: _chance(tasks[name], found[0][name]) for name in names},
        "models": results,
        "differences": [
            {"name": models[0], "minus": other, **_differences(tasks, found[0], theirs)}
            for other, theirs in zip(models[1:], found[1:], strict=True)
        ],
    }


def select(names: Iterable[str]) -> list[str]:
    """Return the names of the selected benchmarks without duplicates; "paper" and "table14" name groups of them."""
    known = [path.stem for path in sorted(TASKS.glob("*.yaml"))]
    chosen: dict[str, None] = {}
    for name in names:
        if name not in known and name not in _GROUPS:
            raise LabError(f"tasks: there is no {name!r}; {nearest(name, [*_GROUPS, *known])}")
        chosen |= dict.fromkeys(_GROUPS.get(name, (name,)))
    return list(chosen)


def find_data(data: str | None) -> str:
    """Return the folder of the questions: `data`, or that of the environment variable KVSHIFT_SHARED_DATA."""
    folder = data or os.environ.get(SHARED_DATA_ENV)
    if not folder:
        raise LabError(f"data must be the folder of the benchmarks' files, or {SHARED_DATA_ENV} must name it")
    if not Path(folder).is_dir():
        raise LabError(f"data must be a folder that exists, got {folder}")
    return folder


def load_tasks(names: Sequence[str], data: str) -> dict[str, Any]:
    """Return lm-eval's tasks by name, with their questions read from the folder `data`."""
    manager = TaskManager(include_path=TASKS, include_defaults=False, metadata={"data": data})
    return manager.load(list(names))["tasks"]


def _answers(name: str, tasks: dict[str, Any], config: EvalConfig) -> tuple[dict[str, Samples], str]:
    model, tokenizer, source = load_model(name, dtype=config.dtype, device=config.device, log=_log)
    if num_appended_tokens(tokenizer, "A text"):
        raise LabError(
            f"tasks: the tokenizer of {name} puts a token behind every text, which lm-eval takes for its end"
        )
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise LabError(f"tasks: the tokenizer of {name} has no token that begins or ends a text (bos, eos)")
    lm = LMEvalModel(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=config.batch_size,
        max_length=config.window,
        softmax_dtype="float32",
    )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or lm.max_length
    if lm.max_length > longest:
        raise LabError(f"window must be at most {longest}, the longest context of {name}, got {config.window}")
    for task in tasks.values():
        if task.OUTPUT_TYPE == "generate_until":
            most = {"max_gen_toks": min(512, lm.max_length // 2)}
            task.set_config("generation_kwargs", most, update=True)
    _log(f"{name}: {', '.join(tasks)}")
    version = f"{identify_model(source, tokenizer.name_or_path)} {lm.max_length} {model.dtype}"
    with _saved_answers(lm, config.output, version) as answering:
        report: Any = run_tasks(answering, {"tasks": tasks}, limit=config.limit, bootstrap_iters=0)
    found = report["samples"]
    for task, samples in found.items():
        samples.sort(key=lambda sample: sample["doc_id"])
        _report_cut_prompts(task, samples, lm)
    return found, source


@contextmanager
def _saved_answers(lm: Any, output: Path | None, version: str) -> Iterator[Any]:
    """Save answers in NAME.VERSION.answers beside the report, as lm-eval does, but as JSON in place of pickles."""
    if output is None:
        yield lm
        return
    path = output.with_name(f"{output.stem}.{hashlib.sha256(version.encode()).hexdigest()[:16]}.answers")
    if path.exists() and path.read_bytes()[:16] not in (b"", b"SQLite format 3\0"):
        raise LabError(f"output: {path} must hold answers of this command, as SQLite; remove it")
    cached = CachingLM(lm, str(path))
    cached.dbdict.encode, cached.dbdict.decode = json.dumps, json.loads
    try:
        try:
            yield cached
        finally:
            cached.dbdict.close()
    except sqlite3.Error as error:
        raise RunFailedError(f"output: writing to {path} failed: {error}; the answers before are kept") from error


def _report_cut_prompts(task: str, samples: Samples, lm: Any) -> None:
    def room(arguments: tuple[Any, ...]) -> int:
        generated = arguments[1]["max_gen_toks"] if isinstance(arguments[1], dict) else -1  # the last token is no input
        return lm.max_length - generated

    def text(arguments: tuple[Any, ...]) -> str:
        return arguments[0] + (arguments[1] if isinstance(arguments[1], str) else "")

    requests = [max(sample["arguments"], key=lambda each: len(text(each))) for sample in samples]
    cut = sum(len(lm.tok_encode(text(each))) > room(each) for each in requests)
    if cut:
        _log(f"{task}: to fit into {lm.max_length} tokens, {cut:,} of {len(samples):,} prompts lost their beginning")


def scores(task: Any, samples: Samples) -> dict[str, Any]:
    """Return the scores of a model on a benchmark.

    Returns:
        "metric", the name of the task's first metric, with its mean "score" and "stderr" over "items"; the other
        metrics, as lm-eval aggregates them; "macro", the mean of the subjects' scores if there are several subjects.
    """
    metric, *others = (each["metric"] for each in task.config.metric_list)
    score = mean_of([float(sample[metric]) for sample in samples])
    numbers: dict[str, Any] = {"metric": metric, "score": score.mean, "stderr": score.stderr, "items": score.n}
    for other in others:
        numbers[other] = float(task.aggregation()[other]([sample[other] for sample in samples]))
    subjects = defaultdict(list)
    for sample in samples:
        subjects[sample["doc"].get("subject")].append(float(sample[metric]))
    if len(subjects) > 1:
        numbers["macro"] = float(np.mean([np.mean(values) for values in subjects.values()]))
    return numbers


def _chance(task: Any, samples: Samples) -> float:
    """Return the expected score of random guessing: 0 for benchmarks without answers to choose from."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0.0
    return float(np.mean([1 / len(sample["arguments"]) for sample in samples]))


def average(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the mean of the eight scores of Table 2, with its error for independent tasks; None if one is missing."""
    if not set(PAPER) <= set(tasks):
        return None
    errors = [tasks[name]["stderr"] for name in PAPER]
    stderr = None if None in errors else math.hypot(*errors) / len(PAPER)
    return {"score": float(np.mean([tasks[name]["score"] for name in PAPER])), "stderr": stderr}


def _differences(tasks: dict[str, Any], ours: dict[str, Samples], theirs: dict[str, Samples]) -> dict[str, Any]:
    pairs = {}
    for name, task in tasks.items():
        metric = task.config.metric_list[0]["metric"]
        pairs[name] = [np.array([float(each[metric]) for each in side[name]]) for side in (ours, theirs)]
    return {"tasks": {name: compare(*pair) for name, pair in pairs.items()}, "average": compare_averages(pairs)}


def compare(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Compare two models on the same questions.

    Args:
        ours, theirs: (questions,) 1 for a correct answer and 0 for a wrong one, in the same order.

    Returns:
        "difference" of the scores with "low" and "high", its 95 % interval by a bootstrap over pairs (percentiles of
        10,000 resamples); "only_first" and "only_second", the numbers of questions that only that model answers
        correctly; "p", the p-value of McNemar's exact test.
    """
    from scipy.stats import binomtest  # takes half a second to import

    only_first, only_second = int(np.sum(ours > theirs)), int(np.sum(ours < theirs))
    p = binomtest(only_first, only_first + only_second).pvalue if only_first + only_second else 1.0
    interval = _interval(float(np.mean(ours) - np.mean(theirs)), _resampled(ours, theirs))
    return {**interval, "only_first": only_first, "only_second": only_second, "p": float(p)}


def compare_averages(pairs: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Any] | None:
    """Compare the averages of two models (see `average`) by a bootstrap over the pairs within each benchmark."""
    if not set(PAPER) <= set(pairs):
        return None
    difference = float(np.mean([np.mean(pairs[name][0]) - np.mean(pairs[name][1]) for name in PAPER]))
    draws = [_resampled(*pairs[name], seed=seed) for seed, name in enumerate(PAPER)]
    return _interval(difference, np.mean(draws, axis=0))


def _resampled(ours: np.ndarray, theirs: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return the difference in each bootstrap resample of the pairs.

    A pair differs by -1, 0 or 1, so the counts of the three values in a resample follow a multinomial distribution.
    """
    counts = np.array([np.sum(ours < theirs), np.sum(ours == theirs), np.sum(ours > theirs)])
    drawn = np.random.default_rng(seed).multinomial(len(ours), counts / len(ours), size=_RESAMPLES)
    return (drawn[:, 2] - drawn[:, 0]) / len(ours)


def _interval(difference: float, resampled: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {"difference": difference, "low": float(low), "high": float(high)}


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
    return [*lines, "", f"percent correct, ± one standard error; questions from {report['data']}"]


def _percent(found: dict[str, Any]) -> str:
    error = "" if found["stderr"] is None else f" ± {100 * found['stderr']:.2f}"
    return f"{100 * found['score']:.2f}{error}"


def _points(found: dict[str, Any]) -> tuple[str, str]:
    difference, low, high = (f"{100 * found[name]:+.2f}" for name in ("difference", "low", "high"))
    return difference, f"{low} to {high}"
