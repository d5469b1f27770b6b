"""`kvshift train`: train one language model on text, in a run folder from which interrupted training resumes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

from datasets import disable_progress_bars
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar

from kvshift_lab.core.atomic import write_json
from kvshift_lab.core.messages import log, quiet
from kvshift_lab.core.options import to_json
from kvshift_lab.data.packing import collate
from kvshift_lab.data.text import TextData, load_text_data
from kvshift_lab.data.tokenizers import save_tokenizer
from kvshift_lab.run.folder import RunFolder, read_metrics
from kvshift_lab.run.lifecycle import (
    add_callbacks,
    explain_training_errors,
    fit,
    fsdp_is_ignored,
    peak_memory,
    prepare_run_folder,
    resolve_defaults,
    save_model,
    training_arguments,
    uses_cpu,
)
from kvshift_lab.run.pretrained import (
    find_pretrained,
    fitting_config,
    load_pretrained,
    weights_digest,
    with_tokenizer,
)
from kvshift_lab.run.probes import check_probes
from kvshift_lab.run.processes import Processes
from kvshift_lab.run.resume import data_fingerprint, resolved_model, start_or_resume
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.run.trainer import LanguageModelTrainer
from kvshift_lab.variants.building import build_model, count_parameters, llama_config
from kvshift_lab.variants.by_name import find_variant, label_of, resolve_variant, variant_of
from kvshift_lab.variants.uncached import decodes_with_cache

_log = partial(log, command="train")


def train(config: TrainConfig, callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Train a language model, or resume an interrupted run. A finished run is not changed.

    `kvshift_lab.run.folder` describes the files that it writes to `config.out`.

    Args:
        config: options of the run.
        callbacks: additional callbacks for transformers' Trainer, such as one that ends training early.

    Raises:
        LabError: an option, the data or the folder is invalid (exit code 2), or the folder is in use (4).
        RunFailedError: a loss or gradient is not finite, or memory or disk space ran out (3).
        InterruptedRunError: the run was ended by SIGINT or SIGTERM (128 + signal number).
    """
    config = dataclasses.replace(config, model=resolve_variant(config.model))
    processes = Processes(cpu=uses_cpu(config))
    folder = RunFolder(config.out)
    log = _log if processes.is_main else quiet
    disable_progress_bar()  # which transformers shows for every file that it writes
    if not (config.progress and sys.stderr.isatty()):
        disable_progress_bars()  # which datasets shows while text is read and packed
    smaller = (
        f"Give a smaller batch_size (now {config.batch_size}) with the same tokens_per_step, or gradient_checkpointing"
    )
    with explain_training_errors(config, smaller), ExitStack() as stack:
        stack.callback(processes.end)  # also after errors: a process that exits without it may be aborted
        if processes.main_first(lambda: prepare_run_folder(stack, folder, config, to_json(config))):
            log(f"{config.out} already contains this run, finished; its results are in {folder.result}")
        else:
            _run(stack, config, folder, processes, log, callbacks)


def _run(
    stack: ExitStack,
    config: TrainConfig,
    folder: RunFolder,
    processes: Processes,
    log: Callable[[str], None],
    callbacks: Sequence[TrainerCallback],
) -> None:
    source = None
    if config.init_from is not None:
        source = find_pretrained(config.init_from, log)
        config = dataclasses.replace(config, data=with_tokenizer(source, config.data))
    data = _load(config, folder.tokenizer, processes)
    tokens, length = len(data.tokenizer), config.data.sequence_length
    if source is None:
        model_config = llama_config(config.model, vocab_size=tokens, sequence_length=length)
    else:
        model_config = fitting_config(source, config.model, vocab_size=tokens, sequence_length=length)
    model_config.bos_token_id = cast(int | None, data.tokenizer.bos_token_id)
    model_config.eos_token_id = cast(int | None, data.tokenizer.eos_token_id)
    accumulation = config.accumulation(processes.count)
    tokens_per_step = accumulation * config.batch_size * config.data.sequence_length * processes.count
    config = dataclasses.replace(config, tokens_per_step=tokens_per_step, **resolve_defaults(config))
    options = to_json(config)
    options["model"] |= resolved_model(model_config)
    facts = data_fingerprint(data)
    frozen = config.model.freeze_shift
    if source is None:
        model = build_model(
            model_config,
            seed=config.seed,
            variant=config.model.variant,
            freeze_shift=frozen,
            zero_outputs=bool(config.model.zero_outputs),
        )
    else:
        model = load_pretrained(source, model_config, freeze_shift=frozen)
        facts["start_weights"] = weights_digest(model)
    sizes = count_parameters(model)
    if config.probes is not None:
        check_probes(model)
    processes.any_process(False)  # wait until all processes have read the files that the first one changes next
    start = processes.main_first(lambda: start_or_resume(folder, options, processes, log, facts))
    model.config.use_cache = False  # a KV cache would take memory in every training step
    variant = find_variant(variant_of(options["model"]))
    # With init_from, the only variants are vanilla and kv-shift.
    more = variant.added_parameters(model_config) if source is None else sizes["shift_parameters"]
    log(
        f"{label_of(options['model'])}: {sizes['parameters']:,} parameters, {more:+,} against vanilla; "
        f"{config.steps} steps of {tokens_per_step:,} tokens"
    )
    trainer = LanguageModelTrainer(
        model,
        training_arguments(config, accumulation=accumulation, batch_size=config.batch_size),
        config,
        processes,
        train=data.train,
        validation=data.validation.select(range(min(config.eval_rows or len(data.validation), len(data.validation)))),
        collate=collate,
    )
    if fsdp_is_ignored(trainer):
        log("FSDP is ignored: accelerate uses it only on GPUs. Each process has the full model (DDP)")
    recorder, graceful_stop = add_callbacks(
        stack, trainer, config, folder, processes, start, tokens_per_step=tokens_per_step
    )
    for callback in callbacks:
        trainer.add_callback(callback)
    seconds = fit(trainer, recorder, graceful_stop, start, processes)
    model.config.use_cache = decodes_with_cache(model)
    save_model(trainer, folder, processes, beside=partial(save_tokenizer, data.tokenizer))
    if processes.is_main:
        result = _result(trainer, folder, config, seconds) | sizes
        write_json(folder.result, result)
        log(f"finished: validation loss {result['eval_loss']:.4f}; model in {folder.model}, results in {folder.result}")


def _load(config: TrainConfig, tokenizer: Path, processes: Processes) -> TextData:
    """Load the data in the first process, which trains the tokenizer and fills the cache, and then in the others."""
    loaded: list[TextData] = []

    def load() -> None:
        loaded.append(load_text_data(config.data, seed=config.seed, tokenizer_folder=tokenizer))

    processes.main_first(load)
    if not processes.is_main:
        load()
    return loaded[0]


def _result(trainer: LanguageModelTrainer, folder: RunFolder, config: TrainConfig, seconds: float) -> dict[str, Any]:
    lines = read_metrics(folder.metrics, "train")
    last = read_metrics(folder.metrics, "eval")[-1]
    steps, tokens = trainer.state.global_step, config.tokens_per_step or 0
    losses, counts = trainer.sequence_losses, trainer.sequence_tokens
    assert losses is not None
    assert counts is not None
    recorded = folder.read(folder.config) or {}
    return {
        "config_hash": recorded.get("config_hash"),
        "steps": steps,
        "tokens": steps * tokens,
        "train_loss": lines[-1]["loss"],
        "eval_loss": last["loss"],
        "eval_loss_stderr": last["loss_stderr"],
        "eval_perplexity": last["perplexity"],
        "eval_rows": last["rows"],
        "seconds": seconds,
        "step_seconds": sorted(line["step_seconds"] for line in lines)[len(lines) // 2],
        "peak_memory_bytes": peak_memory(trainer.args.device),
        "eval_losses_per_row": losses.tolist(),
        "eval_tokens_per_row": counts.tolist(),
    }
