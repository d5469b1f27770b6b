"""The parts of a run that text and tasks share: opening the run folder, training, and saving the model."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback, get_available_reporting_integrations
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from kvshift_lab.core.atomic import remove_folder
from kvshift_lab.core.errors import InterruptedRunError, LabError, RunFailedError
from kvshift_lab.run.callbacks import GracefulStop, Progress, Recorder, Schedule, gather_full
from kvshift_lab.run.folder import Metrics, RunFolder
from kvshift_lab.run.processes import COLLECTIVE_TIMEOUT, Processes
from kvshift_lab.run.resume import ResumePoint, check_folder
from kvshift_lab.run.train_config import RunConfig
from kvshift_lab.run.trainer import RunTrainer
from kvshift_lab.variants.building import rewrite_config_as_llama

# Errors of a disk that is full, over quota, read-only or failing, and of a file that is too large.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def prepare_run_folder(
    stack: ExitStack,
    folder: RunFolder,
    config: RunConfig,
    expect: Callable[[], dict[str, Any]],
    identify: Callable[[], dict[str, str]],
) -> dict[str, str] | None:
    """Check the options, lock the folder until `stack` is closed, and return what identifies the inputs of the run.

    Args:
        stack: exit stack of the run.
        folder: folder of the run.
        config: options of the run.
        expect: returns `config` as JSON, to compare with the folder's config.json; see `other_options`.
        identify: returns what identifies the inputs; see `inputs`.

    Returns:
        None if the folder holds this run, finished.
    """
    config.check()
    refuse_parallelism()
    if config.device == "cuda" and not torch.cuda.is_available():
        raise LabError("device is cuda, but PyTorch sees no GPU here; expected auto or cpu")
    for name in config.report_to:
        if name not in (known := get_available_reporting_integrations()):
            raise LabError(f"report_to must name installed trackers ({', '.join(known) or 'none'}), got {name!r}")
    inputs = identify()
    stack.enter_context(folder.locked())
    return None if check_folder(folder, expect(), inputs) else inputs


def refuse_parallelism() -> None:
    """Raise a LabError if accelerate is configured for more than data parallelism (DDP or FSDP)."""
    settings = {
        "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
        "PARALLELISM_CONFIG_TP_SIZE": "tensor parallelism",
        "PARALLELISM_CONFIG_CP_SIZE": "context parallelism",
        "PARALLELISM_CONFIG_SP_SIZE": "Ulysses sequence parallelism",
    }
    for name, kind in settings.items():
        value = os.environ.get(name, "false").lower()
        if value not in ("false", "0", "1"):
            raise LabError(
                f"{name.lower()} is {value} ({kind}), but kvshift train divides a run by DDP or FSDP alone: "
                "examples/accelerate/fsdp2.yaml shards the model, --gradient-checkpointing saves memory, and "
                "docs/torchtitan.md trains with more kinds of parallelism"
            )


def fsdp_is_ignored(trainer: RunTrainer) -> bool:
    """Return True if accelerate is configured to use FSDP but does not, for example on a CPU."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and not trainer.is_fsdp_enabled


@contextmanager
def explain_training_errors(config: RunConfig, memory_advice: str) -> Iterator[None]:
    """Convert interruptions, out-of-memory errors and disk errors to a LabError that tells the user what to do.

    Args:
        config: options of the run.
        memory_advice: advice on how to use less memory without changing the results of the run.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; the same command resumes the run in {config.out}") from None
    except torch.OutOfMemoryError as error:
        raise RunFailedError(f"out of memory: {error}. {memory_advice}") from error
    except RuntimeError as error:  # PyTorch has no separate class for running out of CPU memory
        if "can't allocate memory" not in str(error) and "Storage size calculation overflowed" not in str(error):
            raise
        raise RunFailedError(f"out of memory: {error}. {memory_advice}") from error
    except OSError as error:  # from writers other than the checkpoints', such as TensorBoard's
        if error.errno not in _DISK:
            raise
        free = shutil.disk_usage(config.out).free
        raise RunFailedError(
            f"writing failed: {error} ({free / 2**20:.0f} MiB are free in {config.out}); what was written before is "
            "kept, and the same command resumes the run"
        ) from error


def training_arguments(config: RunConfig, *, accumulation: int, batch_size: int) -> TrainingArguments:
    """Convert the options to transformers' `TrainingArguments`.

    Args:
        config: options of the run, all resolved.
        accumulation: number of forward passes per optimizer step.
        batch_size: number of items of the data set per forward pass.
    """
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
    # transformers 5.23 renamed this argument, and warns about the old name.
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    switches: dict[str, Any] = {checkpointing: config.gradient_checkpointing}
    arguments = TrainingArguments(
        output_dir=str(config.out),
        max_steps=config.steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
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
        ddp_timeout=int(COLLECTIVE_TIMEOUT.total_seconds()),
        **switches,
    )
    if arguments.n_gpu > 1:  # one process uses one GPU; torchrun starts more processes
        arguments._n_gpu = 1
    return arguments


def add_callbacks(
    stack: ExitStack,
    trainer: RunTrainer,
    config: RunConfig,
    folder: RunFolder,
    processes: Processes,
    start: ResumePoint,
    *,
    tokens_per_step: int,
    log_evaluations: bool = True,
) -> tuple[Recorder, GracefulStop]:
    """Add the callbacks to the trainer; closing `stack`, also after an error, closes their files.

    If `log_evaluations`, the result of each evaluation is printed to stderr.
    """
    metrics = Metrics(folder.metrics, up_to_step=start.step) if processes.is_main else None
    recorder, graceful_stop = Recorder(metrics, tokens_per_step, trainer.evaluation), GracefulStop(processes)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Schedule())
    trainer.add_callback(graceful_stop)
    trainer.add_callback(recorder)
    if metrics is not None:
        stack.callback(metrics.close)
        trainer.before_save(metrics.sync)
        if log_evaluations:
            progress = Progress(trainer.evaluation, tokens_per_step=tokens_per_step, shown=config.progress)
            stack.callback(progress.close)
            trainer.add_callback(progress)
        if "tensorboard" in config.report_to:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder.tensorboard), purge_step=start.step + 1)
            stack.callback(writer.close)
            trainer.add_callback(TensorBoardCallback(writer))
        if "wandb" in config.report_to:
            import wandb  # pyright: ignore[reportMissingImports]

            if wandb.run is None:  # otherwise, the next run of this process would be logged into this one
                stack.callback(wandb.finish)
    return recorder, graceful_stop


def fit(trainer: RunTrainer, recorder: Recorder, graceful_stop: GracefulStop, start: ResumePoint) -> float:
    """Train to the last step and return the training time in seconds, without pauses between stops and resumptions.

    Raises:
        InterruptedRunError: a signal arrived; a checkpoint was written.
    """
    if start.checkpoint is not None:
        require_same_sharding(Path(start.checkpoint), trainer)
        trainer.restore_running_loss(start.checkpoint)
    with graceful_stop.handle_signals():
        trainer.train(resume_from_checkpoint=start.checkpoint)
    step = trainer.state.global_step
    if graceful_stop.number and step < trainer.args.max_steps:
        graceful_stop.end(
            f"stopped after step {step}; checkpoint-{step} is complete, and the same command resumes from it"
        )
    seconds = recorder.seconds
    if not trainer.has_evaluated:  # the run was interrupted between its last checkpoint and its end
        trainer.remove_callback(recorder)
        trainer.remove_callback(TensorBoardCallback)  # already closed; it would open a new writer in OUT/runs
        trainer.evaluate()
    return seconds


def require_same_sharding(checkpoint: Path, trainer: RunTrainer) -> None:
    """Raise a LabError if only one of a checkpoint and this run uses FSDP, which saves shards of the optimizer."""
    saved = any(checkpoint.glob("pytorch_model_fsdp*"))
    if saved != trainer.is_fsdp_enabled:
        with_it, without = ("with FSDP", "without FSDP")[:: 1 if saved else -1]
        raise LabError(f"{checkpoint} was saved {with_it}, but this run is {without}: resume with the same setting")


def save_model(
    trainer: RunTrainer, folder: RunFolder, processes: Processes, beside: Callable[[Path], object] = lambda part: None
) -> None:
    """Write the final model to a temporary folder and rename that to OUT/model, which is thus complete or absent.

    Args:
        trainer: trainer whose model is saved.
        folder: folder of the run.
        processes: processes of the run, all of which must call this function.
        beside: called with the temporary folder in the first process, to add files such as the tokenizer.
    """
    part = folder.path / ".model.part"
    problem = None
    try:
        if processes.is_main:
            remove_folder(part)
        if trainer.is_fsdp_enabled:  # `trainer.save_model` writes nothing if checkpoints are sharded
            model = cast(PreTrainedModel, trainer.model)
            state = {}
            for name, tensor in model.state_dict().items():  # one at a time: the whole model may not fit on a GPU
                gathered = gather_full(tensor)
                if processes.is_main:
                    state[name] = gathered.cpu()
            if processes.is_main:
                model.save_pretrained(str(part), state_dict=state)
        else:
            trainer.save_model(str(part))
        if processes.is_main:
            (part / "training_args.bin").unlink(missing_ok=True)  # a pickle that is not needed
            rewrite_config_as_llama(part)
            beside(part)
            remove_folder(folder.model)  # of a process that was killed before it had written the result
            part.rename(folder.model)
    except (OSError, RuntimeError, SafetensorError) as error:
        problem = error
    if processes.any_process(problem is not None):
        if problem is None:
            raise SystemExit(RunFailedError.exit_code)
        raise RunFailedError(
            f"{folder.model} could not be written: {problem}; the last checkpoint is kept, and the same command resumes"
        ) from problem


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: of tensors on a GPU; of the process on a CPU, or None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
