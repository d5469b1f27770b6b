"""`kvshift analyze`: scores, shift coefficients and attention of the heads of a trained model, on one page.

OUT/heads.json               head scores, coefficients, loss and accuracy on repeated sequences; see `head_scores`
OUT/attention.safetensors    attention maps of the selected heads, (T, T) each, by "layer.head"
OUT/analysis.html, ...       the page, drawn from these files and the run's metrics; see `analysis.head_report`
"""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers.utils import logging

from kvshift_lab.analysis.head_report import SCORES, best_heads, write_head_report
from kvshift_lab.analysis.maps import counts_by_layer
from kvshift_lab.commands.analyze.options import AnalyzeConfig
from kvshift_lab.core.atomic import write_bytes, write_json
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.core.messages import log, no_log
from kvshift_lab.core.options import to_json
from kvshift_lab.data.tokenizers import vocab_size_of
from kvshift_lab.run.head_scores import Measured, attention_maps, measure_heads, sequences_for
from kvshift_lab.run.loading import check_tokenizer, load_tokenizer, load_weights
from kvshift_lab.run.model_files import locate, model_folder

_log = partial(log, command="analyze")


def analyze(config: AnalyzeConfig) -> Path:
    """Measure the heads of a model, write the results and draw the page. Returns the path of the page.

    Raises:
        LabError: The options, the model or the folder cannot be used (exit code 2).
        RunFailedError: The model computes values that are not finite, or a file cannot be written (exit code 3).
    """
    config.check()
    out = config.run / "analysis" if config.out is None else config.out
    folder = model_folder(config.run, _log)  # prints the checkpoint's name; `locate` need not
    tokenizer = None if config.text is None else load_tokenizer(locate(str(config.run), no_log)[1])
    logging.disable_progress_bar()
    model = load_weights(folder, dtype=config.dtype, device=config.device, attn_implementation="eager")
    lowest = _lowest_token(config.run) if config.lowest_token is None else config.lowest_token
    highest = config.highest_token
    if highest is None and (tokens := _number_of_tokens(model, config.run)) is not None:
        highest = tokens - 1
    options = dataclasses.replace(config, lowest_token=lowest, highest_token=highest)
    measured = measure_heads(model, options)
    heads = [dataclasses.asdict(head) for head in measured.heads]
    shown = _shown(heads, config.maps)
    ids, maps = _row(model, options, measured, tokenizer)
    drawn = attention_maps(model, ids, [(head["layer"], head["head"]) for head in shown])
    losses = [half["loss"] for half in measured.behaviour.values()]
    if not all(map(math.isfinite, losses)) or not all(values.isfinite().all() for values in drawn):
        raise RunFailedError(f"model: {folder} computes numbers that are not finite; nothing was written")

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"out: {out} cannot be written to: {error}") from error
    tensors = {
        f"{head['layer']}.{head['head']}": values.contiguous() for head, values in zip(shown, drawn, strict=True)
    }
    write_bytes(out / "attention.safetensors", save(tensors))
    write_json(
        out / "heads.json",
        {
            "name": config.run.resolve().name,
            "source": str(folder),
            "model": type(model).__name__,
            **{name: value for name, value in dataclasses.asdict(measured).items() if name != "heads"},
            "counts": counts_by_layer(measured.coefficients),
            "heads": heads,
            "maps": {"heads": shown, "input_ids": ids.tolist(), **maps},
            "options": to_json(options),
        },
    )
    metrics = config.run / "metrics.jsonl"
    page = write_head_report(out, metrics if metrics.exists() else None)
    _print_summary(heads, measured, page)
    return page


def _shown(heads: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the heads to draw without duplicates: the best heads of each score, with titles that name the scores."""
    titles: dict[tuple[int, int], list[str]] = {}
    for score, (name, place) in SCORES.items():
        for head in best_heads(heads, score)[:count]:
            titles.setdefault((head["layer"], head["head"]), []).append(f"{name} {head['moved'][place]:.2f}")
    return [
        {"layer": layer, "head": head, "title": f"layer {layer}, head {head}: {', '.join(of)}"}
        for (layer, head), of in titles.items()
    ]


def _row(model: Any, config: AnalyzeConfig, measured: Measured, tokenizer: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the token ids to draw attention on, with the caption, labels and start of the repetition."""
    if tokenizer is None:
        ids = sequences_for(model, config, measured.window)[0]
        caption = "On the first of the repeated sequences; the lines mark where the repetition begins."
        return ids, {
            "caption": caption,
            "repeat": len(ids) - measured.length,
            "tokens": [str(id) for id in ids.tolist()],
        }
    ids = torch.tensor(tokenizer(config.text)["input_ids"], dtype=torch.long)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if len(ids) < 2 or (positions is not None and len(ids) > positions):
        limit = "2 tokens or more" if positions is None else f"2 to {positions} tokens"
        raise LabError(f"text must have {limit}, got {len(ids)}")
    caption = f"On the text {json.dumps(config.text, ensure_ascii=False)}."
    return ids, {"caption": caption, "repeat": None, "tokens": [tokenizer.decode([id]) for id in ids.tolist()]}


def _lowest_token(folder: Path) -> int:
    """Return the smallest token id of the task of the run that a folder is, or is part of; 0 if there is no task."""
    for run in (folder, folder.resolve().parent):
        try:
            return int(json.loads((run / "config.json").read_text(encoding="utf-8"))["task"]["lowest_id"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return 0


def _number_of_tokens(model: Any, folder: Path) -> int | None:
    """Return the number of token ids that a model was trained on, which may have more embeddings; None if not known."""
    try:
        _, place = locate(str(folder), no_log)
    except LabError:  # there is no tokenizer
        return getattr(model.config, "classes", None)
    tokenizer = load_tokenizer(place)
    check_tokenizer(tokenizer, model.get_input_embeddings().num_embeddings)
    return vocab_size_of(tokenizer)


def _print_summary(heads: list[dict[str, Any]], measured: Measured, page: Path) -> None:
    for score, (name, place) in SCORES.items():
        head = best_heads(heads, score)[0]
        print(f"{name:<16} {head['moved'][place]:.2f}  layer {head['layer']}, head {head['head']}")
    halves = ", ".join(
        f"{name} half: loss {half['loss']:.3f}, accuracy {100 * half['accuracy']:.1f} %"
        for name, half in measured.behaviour.items()
    )
    print(f"{halves}\n{page}")
