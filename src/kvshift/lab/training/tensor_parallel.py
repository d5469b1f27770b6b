"""Tensor parallelism of transformers: the processes share one model, and each has some of its heads.

`accelerate launch` asks for it with `parallelism_config_tp_size`. All processes get the same sequences. What is saved is
whole, so that one process can go on from a checkpoint of several, and several from that of one.
"""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from kvshift.lab.core.atomic import remove_folder
from kvshift.lab.core.errors import LabError
from kvshift.lab.runs.folder import RunFolder
from kvshift.lab.runs.processes import Processes
from kvshift.lab.training.callbacks import whole
from kvshift.lab.training.train_config import RunConfig, TrainConfig
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM


def parallelism_size(name: str) -> int:
    """Size of one dimension ("tp", "cp", "sp") of the ParallelismConfig that accelerate was told to use; 1: unused."""
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return 1
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))


def tensor_parallel_size() -> int:
    """Number of processes that share one model; 1: each has a whole one, or what FSDP leaves it."""
    return parallelism_size("tp")


def check_tensor_parallel(config: RunConfig) -> None:
    """Raise a LabError that names the option or setting which tensor parallelism does not go with, if one is given."""
    size = tensor_parallel_size()
    if size == 1:
        return
    asked = f"parallelism_config_tp_size is {size} (tensor parallelism)"
    if not isinstance(config, TrainConfig):
        raise LabError(f"{asked}, expected 1: of all commands, only `kvshift train` supports it")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes != size:
        raise LabError(f"{asked}, expected {processes}: all processes share one model, and there are {processes} here")
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise LabError(f"{asked}, and ACCELERATE_USE_{name} is true: `kvshift train` does not combine the two")
    for name, unset in (("tune", None), ("probes", None), ("compile", False)):
        value = getattr(config, name)
        if value != unset:
            raise LabError(f"{name} is {value!r}, expected {unset}: {asked}, which does not support it")
    require_gpu(config)


def require_gpu(config: RunConfig) -> None:
    """Raise a LabError for a run on the CPU."""
    if config.device == "cpu" or not torch.cuda.is_available():
        raise LabError(
            "parallelism_config_tp_size needs GPUs, and this run is on the CPU, where accelerate refuses tensor parallelism"
        )


def check_model(config: Any, *, accumulation: int) -> None:
    """Raise a LabError where several processes cannot share a model.

    Args:
        config: of the model.
        accumulation: forward passes in one optimizer step.
    """
    size = tensor_parallel_size()
    if size == 1:
        return
    asked = f"parallelism_config_tp_size is {size} (tensor parallelism)"
    if type(config) is not KVShiftLlamaConfig:
        raise LabError(
            f"{asked}, expected 1: the model is of model_type {config.model_type}, and only the coefficients of "
            f"{KVShiftLlamaConfig.model_type} are divided like its heads"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if (value := getattr(config, name)) % size:
            raise LabError(f"model.{name} must be a multiple of parallelism_config_tp_size ({size}), got {value}")
    if config.attention_dropout:
        raise LabError(
            f"attention_dropout is {config.attention_dropout}, expected 0: {asked}, and all processes would drop the "
            "same positions"
        )
    if config.qk_norm and accumulation > 1:
        raise LabError(
            f"model.qk_norm with {accumulation} forward passes in each step: {asked}, and transformers sums the "
            "gradients of QK-norm over processes after each pass, together with those of earlier passes, which are "
            "summed already. Give a larger batch_size with the same tokens_per_step"
        )


def divide(
    model: KVShiftLlamaForCausalLM, checkpoint: str | None, folder: RunFolder, processes: Processes
) -> KVShiftLlamaForCausalLM:
    """The model with this process's part of the weights; all processes must call it.

    Args:
        model: whole, in every process.
        checkpoint: to read the weights from; None: they are those of `model`.
        folder: of the run, where transformers can read what it divides.
        processes: of the run.
    """
    part = folder.path / ".model.part"
    if checkpoint is None:
        processes.main_first(lambda: model.save_pretrained(part))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # that the plan also names QK-norm, which not every model has
    try:
        divided = KVShiftLlamaForCausalLM.from_pretrained(
            checkpoint or part,
            config=deepcopy(model.config),
            dtype=torch.float32,
            distributed_config=DistributedConfig(tp_size=tensor_parallel_size(), tp_plan="auto"),
        )
    finally:
        logging.set_verbosity(verbosity)
    # Newer versions of Trainer refuse to write checkpoints of such a model, for which `RunTrainer` gathers all parts.
    divided._is_distributed_loading_by_transformers = False
    for name, parameter in divided.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    divided.generation_config = model.generation_config
    processes.any(False)  # all of them have read it
    if processes.is_main:
        remove_folder(part)
    return divided


def keep_optimizer_state_whole(optimizer: torch.optim.Optimizer) -> None:
    """Have `state_dict` gather the state of divided parameters, and `load_state_dict` divide it again.

    All processes must call either of them together.
    """

    def gather(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "state": _map_tensors(state_dict["state"], lambda _, tensor: whole(tensor))}

    def split(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {
            **state_dict,
            "state": _map_tensors(state_dict["state"], lambda i, tensor: _like(tensor, parameters[i])),
        }

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(split)


def _map_tensors(state: dict[int, dict[str, Any]], function: Any) -> dict[int, dict[str, Any]]:
    return {
        number: {
            name: function(number, value) if isinstance(value, Tensor) else value for name, value in values.items()
        }
        for number, values in state.items()
    }


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of a state, divided like the parameter; a number, such as the step, as it is."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    on_device = tensor.to(cast(Any, parameter).device)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)
