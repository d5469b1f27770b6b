"""`kvshift train`: one language model, from text to a saved model, in a folder that survives every interruption."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch
from datasets import disable_progress_bars
from safetensors import SafetensorError
from transformers import TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback, get_available_reporting_integrations
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from kvshift.lab.beginning import Start, begin, enter
from kvshift.lab.callbacks import InterruptedRunError, Leave, Moments, Progress, Recorder, whole
from kvshift.lab.config import TrainConfig
from kvshift.lab.data import TextData, collate, load_text_data
from kvshift.lab.errors import LabError
from kvshift.lab.language_model import build_model, llama_config, shift_layers
from kvshift.lab.processes import PATIENCE, Processes
from kvshift.lab.records import Metrics, RunFailedError, RunFolder, read_metrics, remove_folder, write_json
from kvshift.lab.trainer import LanguageModelTrainer
from kvshift.models.llama import KVShiftLlamaForCausalLM

__all__ = ["TrainConfig", "train"]


def train(config: TrainConfig) -> None:
    """Train, or go on where the same call was interrupted; a finished run is left as it is.

    What it leaves in `config.out`: see `kvshift.lab.records`.

    Raises:
        LabError: options, data or folder are not fit (exit code 2), or the folder is in use (4).
        RunFailedError: a number is not finite, or the disk is full (3).
        InterruptedRunError: SIGINT or SIGTERM came (128 + its number).
    """
    processes = Processes(cpu=_on_cpu(config))
    folder = RunFolder(config.out)
    say = _say if processes.is_main else _silent
    disable_progress_bar()  # transformers' own, for every file that it writes
    if not (config.progress and sys.stderr.isatty()):
        disable_progress_bars()  # of reading and packing the text
    try:
        with ExitStack() as stack:
            stack.callback(processes.end)  # after errors too: a process that leaves without it may be aborted
            if processes.main_first(lambda: _open(stack, folder, config)):
                say(f"{config.out} holds this run, finished; its numbers are in {folder.result}")
            else:
                _run(stack, config, folder, processes, say)
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; the same command goes on from what {config.out} holds") from None
    except torch.OutOfMemoryError as error:
        raise RunFailedError(
            f"out of memory: {error}. Give a smaller batch_size (now {config.batch_size}) with the same "
            "tokens_per_step, or gradient_checkpointing"
        ) from error


def _open(stack: ExitStack, folder: RunFolder, config: TrainConfig) -> bool:
    """Check the options and hold the folder; whether the run in it is finished."""
    config.check()
    if config.device == "cuda" and not torch.cuda.is_available():
        raise LabError("device is cuda, but PyTorch sees no GPU here; expected auto or cpu")
    for name in config.report_to:
        if name not in (known := get_available_reporting_integrations()):
            raise LabError(f"report_to names {name!r}; trackers installed here: {', '.join(known) or 'none'}")
    stack.enter_context(folder.locked())
    return enter(folder, config)


def _run(
    stack: ExitStack, config: TrainConfig, folder: RunFolder, processes: Processes, say: Callable[[str], None]
) -> None:
    data = _load(config, folder, processes)
    model_config = llama_config(
        config.model, vocab_size=len(data.tokenizer), sequence_length=config.data.sequence_length
    )
    model_config.bos_token_id = cast(int | None, data.tokenizer.bos_token_id)
    model_config.eos_token_id = cast(int | None, data.tokenizer.eos_token_id)
    accumulation = config.accumulation(processes.count)
    resolved = dataclasses.replace(
        config,
        tokens_per_step=accumulation * config.batch_size * config.data.sequence_length * processes.count,
        bf16="yes" if _in_bf16(config) else "no",
        device="cpu" if _on_cpu(config) else "cuda",
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=config.warmup_steps),
    )
    start = processes.main_first(lambda: begin(folder, resolved, model_config, data, processes, say))

    model = build_model(model_config, seed=config.seed, freeze_shift=config.model.freeze_shift)
    model.config.use_cache = False  # no cache of keys and values beside every training step
    sizes = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "shift_parameters": sum(p.numel() for layer in shift_layers(model) for p in layer.parameters()),
    }
    say(
        f"{sizes['parameters']:,} parameters, {sizes['shift_parameters']} of them of the shift; "
        f"{resolved.steps} steps of {resolved.tokens_per_step:,} tokens"
    )
    trainer = LanguageModelTrainer(
        model,
        _arguments(resolved, accumulation),
        resolved,
        processes,
        train=data.train,
        validation=data.validation.select(range(min(config.eval_rows or len(data.validation), len(data.validation)))),
        collate=collate,
    )
    recorder, leave = _attach(stack, trainer, resolved, folder, processes, start)
    with leave.listening():
        trainer.train(resume_from_checkpoint=start.checkpoint)
    step = trainer.state.global_step
    if leave.number and step < config.steps:
        if not processes.is_main:
            raise SystemExit(128 + leave.number)
        raise InterruptedRunError(
            f"left after step {step}; checkpoint-{step} is whole: the same command goes on", leave.number
        )

    seconds = recorder.seconds
    if trainer.row_losses is None:  # interrupted between the last checkpoint and the end
        trainer.remove_callback(recorder)
        trainer.evaluate()
    model.config.use_cache = True
    _save_model(trainer, data, folder, processes)
    if processes.is_main:
        result = _result(trainer, folder, resolved, seconds) | sizes
        write_json(folder.result, result)
        say(f"finished: validation loss {result['eval_loss']:.4f}; model in {folder.model}, numbers in {folder.result}")


def _load(config: TrainConfig, folder: RunFolder, processes: Processes) -> TextData:
    """The first process reads, trains the tokenizer and fills the cache; then the others find all of it there."""
    loaded: list[TextData] = []

    def load() -> None:
        loaded.append(load_text_data(config.data, seed=config.seed, tokenizer_folder=folder.tokenizer))

    processes.main_first(load)
    if not processes.is_main:
        load()
    return loaded[0]


def _arguments(config: TrainConfig, accumulation: int) -> TrainingArguments:
    """The options in transformers' words."""
    optimizer = config.optimizer
    schedule, details = {
        "constant": ("constant_with_warmup", {}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": optimizer.min_lr_ratio}),
        "wsd": (
            "warmup_stable_decay",
            {
                "num_decay_steps": round(config.steps * optimizer.decay_fraction),
                "decay_type": "linear",
                "min_lr_ratio": optimizer.min_lr_ratio,
            },
        ),
    }[optimizer.schedule]
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    # transformers 5.23 has renamed it, and warns of the older name.
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    switches: dict[str, Any] = {checkpointing: config.gradient_checkpointing}
    arguments = TrainingArguments(
        output_dir=str(config.out),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=accumulation,
        learning_rate=optimizer.learning_rate,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_norm,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=details,
        warmup_steps=config.warmup_steps,
        seed=config.seed,
        eval_strategy="steps",
        eval_steps=config.eval_every,
        save_strategy="steps",
        save_steps=config.save_every,
        logging_strategy="steps",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # a loss that is not finite ends the run
        report_to=[name for name in config.report_to if name != "tensorboard"] or "none",
        use_cpu=config.device == "cpu",
        bf16=config.bf16 == "yes",
        torch_compile=config.compile,
        dataloader_num_workers=config.data_workers,
        dataloader_pin_memory=config.device == "cuda",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        ddp_timeout=int(PATIENCE.total_seconds()),
        **switches,
    )
    if arguments.n_gpu > 1:  # one process uses one GPU; torchrun starts more processes
        arguments._n_gpu = 1
    return arguments


def _attach(
    stack: ExitStack,
    trainer: LanguageModelTrainer,
    config: TrainConfig,
    folder: RunFolder,
    processes: Processes,
    start: Start,
) -> tuple[Recorder, Leave]:
    """Give the trainer its callbacks; what they hold open is closed with `stack`, also after an error."""
    metrics = Metrics(folder.metrics, up_to_step=start.step) if processes.is_main else None
    tokens = config.tokens_per_step
    assert tokens is not None  # resolved
    recorder, leave = Recorder(metrics, tokens), Leave(processes)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Moments())
    trainer.add_callback(leave)
    trainer.add_callback(recorder)
    if metrics is not None:
        stack.callback(metrics.close)
        trainer.before_save(metrics.sync)
        progress = Progress(bar=config.progress)
        stack.callback(progress.close)
        trainer.add_callback(progress)
        if "tensorboard" in config.report_to:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder.tensorboard), purge_step=start.step + 1 if start.step else None)
            stack.callback(writer.close)
            trainer.add_callback(TensorBoardCallback(writer))
    return recorder, leave


def _save_model(trainer: LanguageModelTrainer, data: TextData, folder: RunFolder, processes: Processes) -> None:
    """Write the final model under another name first: `model` is whole or not there."""
    part = folder.path / ".model.part"
    problem = None
    try:
        if processes.is_main:
            remove_folder(part)
        if trainer.is_fsdp_enabled:  # also where checkpoints are sharded, which `save_model` leaves out
            model = cast(KVShiftLlamaForCausalLM, trainer.model)
            state = {}
            for name, tensor in model.state_dict().items():  # one after the other: all at once may not fit a GPU
                gathered = whole(tensor)
                if processes.is_main:
                    state[name] = gathered.cpu()
            if processes.is_main:
                model.save_pretrained(str(part), state_dict=state)
        else:
            trainer.save_model(str(part))
        if processes.is_main:
            (part / "training_args.bin").unlink(missing_ok=True)  # a pickle that nobody needs
            data.tokenizer.save_pretrained(str(part))
            remove_folder(folder.model)
            part.rename(folder.model)
    except (OSError, RuntimeError, SafetensorError) as error:
        problem = error
    if processes.any(problem is not None):
        if problem is None:
            raise SystemExit(RunFailedError.exit_code)
        raise RunFailedError(
            f"{folder.model} could not be written: {problem}; the last checkpoint is kept, and the same command goes on"
        ) from problem


def _result(trainer: LanguageModelTrainer, folder: RunFolder, config: TrainConfig, seconds: float) -> dict[str, Any]:
    lines = read_metrics(folder.metrics, "train")
    last = read_metrics(folder.metrics, "eval")[-1]
    steps, tokens = config.steps, config.tokens_per_step or 0
    losses, counts = trainer.row_losses, trainer.row_tokens
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
        "peak_memory_bytes": _peak_memory(trainer.args.device),
        "eval_losses_per_row": losses.tolist(),
        "eval_tokens_per_row": counts.tolist(),
    }


def _peak_memory(device: torch.device) -> int | None:
    """Of the GPU, what tensors took at most; on a CPU, of the whole process since its start. In bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _on_cpu(config: TrainConfig) -> bool:
    return config.device == "cpu" or not torch.cuda.is_available()


def _in_bf16(config: TrainConfig) -> bool:
    if config.bf16 == "auto":
        return not _on_cpu(config) and torch.cuda.is_bf16_supported()
    return config.bf16 == "yes"


def _say(text: str) -> None:
    print(f"kvshift train: {text}", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    pass
