"""`kvshift eval MODEL FILE ... --repetition`: how much models repeat themselves when they continue the same prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice, takewhile
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from kvshift_lab.analysis.tables import as_text
from kvshift_lab.commands.eval.answer_cache import AnswerCache, answer_key, open_answer_cache
from kvshift_lab.commands.eval.options import EvalConfig
from kvshift_lab.commands.eval.repetition import LOOP_TIMES, distinct, distinct_difference, loop_length, rep
from kvshift_lab.commands.eval.text_scores import Model, documents, prepare, with_interval
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.messages import log
from kvshift_lab.core.seeds import seed_for
from kvshift_lab.core.statistics import mean_of
from kvshift_lab.data.token_stream import token_stream
from kvshift_lab.run.inputs import identify_model
from kvshift_lab.run.loading import load_model
from kvshift_lab.run.progress import with_progress
from kvshift_lab.variants.continuing import continue_rows

_log = partial(log, command="eval")

_PROMPTS = 100  # the default for config.limit
_LENGTHS = (1, 2, 3, 4)  # n of rep-n and of distinct-n

Texts = list[list[int]]  # tokens of continuations, in the order of the prompts


def measure(config: EvalConfig) -> dict[str, Any]:
    """Let each model continue prompts from the text, and return the report on their repetition.

    The documents are cut into consecutive parts of `prompt_tokens + max_new_tokens` tokens. Each part begins with a
    prompt, and the rest of the part is the reference continuation, reported as "itself". Each model continues the
    prompts greedily and by sampling, both without and with `repetition_penalty`. "models" holds rep-1 to rep-4 and the
    share of continuations that end in a loop, each a mean over prompts with its standard error, and distinct-1 to
    distinct-4. "differences" holds the first model minus each other model with 95 % intervals, paired by prompt.
    Continuations are saved beside `config.output`, and an interrupted command resumes from them.

    Raises:
        LabError: The options, text or a model cannot be used (exit code 2), or memory runs out (3).
    """
    models = [prepare(name, config) for name in (config.model, *config.against)]
    _check(models, config)
    parts = _parts(models[0], config)
    before = [] if models[0].begin is None else [models[0].begin]
    prompts = [before + part[: config.prompt_tokens] for part in parts]
    with open_answer_cache(config.output) as cache:
        written = [_continue(model, prompts, config, cache) for model in models]
    return {
        "text": {"names": list(config.texts), "prompts": len(prompts)},
        "itself": _measures([part[config.prompt_tokens :] for part in parts]),
        "models": [
            {
                "name": model.name,
                "source": model.folder,
                "decodings": {name: _measures(texts) for name, texts in theirs.items()},
            }
            for model, theirs in zip(models, written, strict=True)
        ],
        "differences": [
            {
                "name": models[0].name,
                "minus": model.name,
                "decodings": {name: _differences(written[0][name], texts) for name, texts in theirs.items()},
            }
            for model, theirs in zip(models[1:], written[1:], strict=True)
        ],
    }


def _check(models: list[Model], config: EvalConfig) -> None:
    """Raise a LabError unless all models share a tokenizer and can process prompt and continuation."""
    for model in models:
        longest = math.inf if model.longest is None else model.longest - (model.begin is not None)
        if config.prompt_tokens + config.max_new_tokens > longest:
            first = "" if model.begin is None else " without the beginning-of-text token"
            raise LabError(
                f"prompt_tokens + max_new_tokens must be at most {longest}, the longest context of {model.name}{first}"
                f", got {config.prompt_tokens} + {config.max_new_tokens}"
            )
        if model.encode.to_str() != models[0].encode.to_str():
            raise LabError(
                f"against: {model.name} and {models[0].name} must have the same tokenizer, because repetition is "
                "counted in tokens"
            )


def _parts(model: Model, config: EvalConfig) -> list[list[int]]:
    """Return the token ids of each prompt together with the continuation that follows it in the text."""
    length = config.prompt_tokens + config.max_new_tokens
    parts = list(islice(_cut(model, config, length), config.limit or _PROMPTS))
    if not parts:
        raise LabError(
            f"texts: no document of {', '.join(config.texts)} has {length} tokens, the length of a prompt with its "
            "continuation"
        )
    return parts


def _cut(model: Model, config: EvalConfig, length: int) -> Iterator[list[int]]:
    waiting: list[int] = []
    for ids, _, last in token_stream(documents(config), model.encode):
        waiting += ids.tolist()
        while len(waiting) >= length:
            yield waiting[:length]
            waiting = waiting[length:]
        if last:
            waiting = []


def _decodings(config: EvalConfig) -> dict[str, dict[str, Any]]:
    """Return the options of `GenerationConfig` that select each decoding strategy, by its name."""
    sampled: dict[str, Any] = {"do_sample": True, "temperature": config.temperature, "top_k": 0, "top_p": 1.0}
    sampling = f"sampled at temperature {config.temperature:g}"
    penalty = {"repetition_penalty": config.repetition_penalty}
    return {
        "greedy": {"do_sample": False},
        f"greedy, penalty {config.repetition_penalty:g}": {"do_sample": False, **penalty},
        sampling: sampled,
        f"{sampling}, penalty {config.repetition_penalty:g}": sampled | penalty,
    }


def _continue(model: Model, prompts: list[list[int]], config: EvalConfig, cache: AnswerCache) -> dict[str, Texts]:
    loaded, tokenizer, source = load_model(model.folder, dtype=config.dtype, device=config.device, log=_log)
    ends = loaded.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [tokenizer.eos_token_id if ends is None else ends]
    stop = {} if ends == [None] else {"eos_token_id": ends, "pad_token_id": ends[0]}
    version = f"{identify_model(source, tokenizer.name_or_path)} {loaded.dtype}"
    decodings = _decodings(config)
    written: dict[str, Texts] = {name: [] for name in decodings}
    starts = [(name, start) for name in decodings for start in range(0, len(prompts), config.batch_size)]
    for name, start in with_progress(starts, model.name, "batches", shown=True):
        batch, seed = prompts[start : start + config.batch_size], seed_for(f"repetition {name} {start}", config.seed)
        settings = {**decodings[name], "max_new_tokens": config.max_new_tokens, "pad_token_id": 0, **stop}
        key = answer_key(version, batch, settings, seed)
        if key not in cache:
            tokens = continue_rows(loaded, list(map(torch.tensor, batch)), GenerationConfig(**settings), seed=seed)
            cache.add(key, [list(takewhile(lambda token: token not in ends, row)) for row in tokens.tolist()])
        written[name] += cache[key]
    return written


def _values(texts: Texts) -> dict[str, list[float]]:
    """Return the measures that are computed for each continuation separately, one value per continuation."""
    own = {f"rep-{n}": [rep(tokens, n) for tokens in texts] for n in _LENGTHS}
    return own | {
        "loops": [float(loop_length(tokens) is not None) for tokens in texts],
        "tokens": [float(len(tokens)) for tokens in texts],
    }


def _measures(texts: Texts) -> dict[str, dict[str, Any]]:
    found = {name: mean_of(values) for name, values in _values(texts).items()}
    found |= {f"distinct-{n}": distinct(texts, n) for n in _LENGTHS}
    return {name: {"value": estimate.mean, "stderr": estimate.stderr} for name, estimate in found.items()}


def _differences(ours: Texts, theirs: Texts) -> dict[str, dict[str, Any]]:
    found = {
        name: mean_of(np.subtract(values, other).tolist())
        for (name, values), other in zip(_values(ours).items(), _values(theirs).values(), strict=True)
    }
    found |= {f"distinct-{n}": distinct_difference(ours, theirs, n) for n in _LENGTHS}
    return {name: with_interval(estimate) for name, estimate in found.items()}


_SHOWN = ("rep-2", "rep-4", "loops", "distinct-1", "distinct-2", "tokens")
_COMPARED = ("rep-4", "loops", "distinct-2")


def table(report: dict[str, Any]) -> list[str]:
    """Format the report for the terminal, as a list of lines."""
    rows = [("", *_SHOWN), ("the text itself", *_cells(report["itself"]))]
    for model in report["models"]:
        rows += [(f"{model['name']}, {name}", *_cells(found)) for name, found in model["decodings"].items()]
    lines = [as_text(rows)]
    for difference in report["differences"]:
        rows = [(f"{difference['name']} minus {difference['minus']}", *_COMPARED)]
        rows += [(name, *_ranges(found)) for name, found in difference["decodings"].items()]
        lines += ["", as_text(rows)]
    count = report["text"]["prompts"]
    return [
        *lines,
        "",
        f"{count:,} prompt{'s' * (count != 1)} of {report['options']['prompt_tokens']} tokens; rep-n: share of n-grams "
        f"that repeat an earlier one; loops: share of continuations that end in a phrase {LOOP_TIMES} times in a row; "
        "distinct-n: distinct n-grams of all continuations, per token; tokens: length of a continuation; "
        "± is one standard error, ranges are 95 % intervals",
    ]


def _cells(found: dict[str, dict[str, Any]]) -> list[str]:
    return [_cell(name, found[name]) for name in _SHOWN]


def _cell(name: str, found: dict[str, Any]) -> str:
    digits = 1 if name == "tokens" else 3
    error = "" if found["stderr"] is None else f" ± {found['stderr']:.{digits}f}"
    return f"{found['value']:.{digits}f}{error}"


def _ranges(found: dict[str, dict[str, Any]]) -> list[str]:
    cells = []
    for pair in (found[name] for name in _COMPARED):
        interval = "" if pair["low"] is None else f" ({pair['low']:+.3f} to {pair['high']:+.3f})"
        cells.append(f"{pair['difference']:+.3f}{interval}")
    return cells
