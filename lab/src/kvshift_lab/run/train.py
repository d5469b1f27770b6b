"""`kvshift train`: train one language model on text, in a run folder from which interrupted training resumes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from datasets import disable_progress_bars
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar

from kvshift_lab.core.atomic import write_json
from kvshift_lab.core.messages import log, no_log
from kvshift_lab.data.packing import collate
from kvshift_lab.data.tokenizers import save_tokenizer, vocab_size_of
from kvshift_lab.run.folder import RunFolder, read_metrics
from kvshift_lab.run.inputs import identify_inputs
from kvshift_lab.run.lifecycle import (
    add_callbacks,
    explain_training_errors,
    fit,
    fsdp_is_ignored,
    peak_memory,
    prepare_run_folder,
    save_model,
    training_arguments,
)
from kvshift_lab.run.pretrained import load_pretrained
from kvshift_lab.run.probes import check_probes
from kvshift_lab.run.processes import Processes
from kvshift_lab.run.resolve import ResolvedRun, expected_options, resolve, uses_cpu
from kvshift_lab.run.resume import data_sizes, start_or_resume
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.run.trainer import LanguageModelTrainer
from kvshift_lab.variants.building import build_model, count_parameters, freeze_shift
from kvshift_lab.variants.by_name import find_variant, label_of, variant_of
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
    processes = Processes(cpu=uses_cpu(config))
    folder = RunFolder(config.out)
    log = _log if processes.is_main else no_log
    disable_progress_bar()  # which transformers shows for every file that it writes
    if not (config.progress and sys.stderr.isatty()):
        disable_progress_bars()  # which datasets shows while text is read and packed
    smaller = (
        f"Give a smaller batch_size (now {config.batch_size}) with the same tokens_per_step, or gradient_checkpointing"
    )
    with explain_training_errors(config, smaller), ExitStack() as stack:
        stack.callback(processes.end)  # also after errors: a process that exits without it may be aborted
        inputs = processes.main_first(
            lambda: prepare_run_folder(
                stack,
                folder,
                config,
                lambda: expected_options(config),
                lambda: identify_inputs(config.data, config.init_from, config.model.config),
            )
        )
        if inputs is None:
            log(f"{config.out} already contains this run, finished; its results are in {folder.result}")
        else:
            run = resolve(config, processes, tokenizer=folder.tokenizer, log=log)
            _run(stack, run, inputs, folder, processes, log, callbacks)


def _run(
    stack: ExitStack,
    run: ResolvedRun,
    inputs: dict[str, str],
    folder: RunFolder,
    processes: Processes,
    log: Callable[[str], None],
    callbacks: Sequence[TrainerCallback],
) -> None:
    config, data = run.config, run.data
    model = _initial_model(run)
    sizes = count_parameters(model)
    if config.probes is not None:
        check_probes(model)
    facts = data_sizes(data) | inputs
    processes.any_process(False)  # wait until all processes have read the files that the first one changes next
    start = processes.main_first(lambda: start_or_resume(folder, run.options, processes, log, facts))
    model.config.use_cache = False  # a KV cache would take memory in every training step
    variant = find_variant(variant_of(run.options["model"]))
    # With init_from, the only variants are vanilla and kv-shift.
    more = variant.added_parameters(run.model_config) if run.source is None else sizes["shift_parameters"]
    tokens_per_step = config.tokens_per_step or 0
    log(
        f"{label_of(run.options['model'])}: {sizes['parameters']:,} parameters, {more:+,} against vanilla; "
        f"{config.steps} steps of {tokens_per_step:,} tokens"
    )
    trainer = LanguageModelTrainer(
        model,
        training_arguments(config, accumulation=run.accumulation, batch_size=config.batch_size),
        config,
        processes,
        train=data.train,
        validation=data.validation.select(range(min(config.eval_rows or len(data.validation), len(data.validation)))),
        collate=collate,
        vocab_size=vocab_size_of(data.tokenizer),
    )
    if fsdp_is_ignored(trainer):
        log("FSDP is ignored: accelerate uses it only on GPUs. Each process has the full model (DDP)")
    recorder, graceful_stop = add_callbacks(
        stack, trainer, config, folder, processes, start, tokens_per_step=tokens_per_step
    )
    for callback in callbacks:
        trainer.add_callback(callback)
    seconds = fit(trainer, recorder, graceful_stop, start)
    model.config.use_cache = decodes_with_cache(model)
    save_model(trainer, folder, processes, beside=partial(save_tokenizer, data.tokenizer))
    if processes.is_main:
        result = _result(trainer, folder, config, seconds) | sizes
        write_json(folder.result, result)
        log(f"finished: validation loss {result['eval_loss']:.4f}; model in {folder.model}, results in {folder.result}")
    graceful_stop.end_if_received(folder.path)


def _initial_model(run: ResolvedRun) -> Any:
    options = run.config.model
    if run.source is not None:
        model = load_pretrained(run.source, run.model_config)
    else:
        zero_outputs = bool(options.zero_outputs)
        model = build_model(run.model_config, seed=run.config.seed, variant=options.variant, zero_outputs=zero_outputs)
    freeze_shift(model, options)
    return model


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
