"""Tensor parallelism with transformers: all processes share one model, and each has some of its heads.

The setting `parallelism_config_tp_size` of accelerate's launcher enables it. Every process gets the same sequences.
Checkpoints and the final model are not sharded, so a run can be resumed with a different number of processes.
"""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.core.atomic import remove_folder
from kvshift_lab.core.errors import LabError
from kvshift_lab.runs.folder import RunFolder
from kvshift_lab.runs.loading import without_report
from kvshift_lab.runs.processes import Processes
from kvshift_lab.training.callbacks import gather_full
from kvshift_lab.training.train_config import RunConfig, TrainConfig


def parallelism_size(name: str) -> int:
    """Return the size of one dimension ("tp", "cp", "sp") of accelerate's ParallelismConfig, or 1 if it is not used."""
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return 1
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))


def tensor_parallel_size() -> int:
    """Return the number of processes that share one model, or 1 without tensor parallelism."""
    return parallelism_size("tp")


def check_tensor_parallel(config: RunConfig) -> None:
    """Raise a LabError if an option or setting is incompatible with tensor parallelism."""
    size = tensor_parallel_size()
    if size == 1:
        return
    if not isinstance(config, TrainConfig):
        raise LabError(f"{_tp_size()}, expected 1: only `kvshift train` supports it")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes != size:
        raise LabError(f"{_tp_size()}, expected {processes}, the number of processes: all of them share one model")
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise LabError(f"{_tp_size()} and ACCELERATE_USE_{name} is true: `kvshift train` does not combine them")
    for name, unset in (("tune", None), ("probes", None), ("compile", False)):
        value = getattr(config, name)
        if value != unset:
            raise LabError(f"{name} is {value!r}, expected {unset}: {_tp_size()}, which does not support it")
    require_gpu(config)


def require_gpu(config: RunConfig) -> None:
    """Raise a LabError if the run uses the CPU."""
    if config.device == "cpu" or not torch.cuda.is_available():
        raise LabError(f"{_tp_size()}, expected 1 on a CPU: accelerate supports it only on GPUs")


def check_model(model: nn.Module, *, accumulation: int) -> None:
    """Raise a LabError if tensor parallelism is enabled but does not support this model.

    Args:
        model: the full model.
        accumulation: number of forward passes per optimizer step.
    """
    size = tensor_parallel_size()
    if size == 1:
        return
    config = cast(PreTrainedModel, model).config
    if type(model) is not KVShiftLlamaForCausalLM:
        raise LabError(
            f"{_tp_size()}, expected 1 for a model of model_type {config.model_type}: only kvshift_llama shards "
            "the coefficients like the heads"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if (value := getattr(config, name)) % size:
            raise LabError(f"model.{name} must be a multiple of parallelism_config_tp_size, {size}; got {value}")
    if config.attention_dropout:
        raise LabError(
            f"attention_dropout is {config.attention_dropout}, expected 0: {_tp_size()}, and all processes would "
            "drop the same positions"
        )
    if config.qk_norm and accumulation > 1:
        # After each backward pass, ReplicatedWithGradAllReduce sums all of `param.grad` over the processes, not only
        # the gradient that this pass has added to it.
        raise LabError(
            f"model.qk_norm is True and a step has {accumulation} forward passes, expected 1: {_tp_size()}, with which "
            "transformers does not accumulate the gradients of QK-norm correctly. Give batch_size = tokens_per_step / "
            "data.sequence_length"
        )


def _tp_size() -> str:
    return f"parallelism_config_tp_size is {tensor_parallel_size()} (tensor parallelism)"


def shard_model(
    model: KVShiftLlamaForCausalLM, checkpoint: str | None, folder: RunFolder, processes: Processes
) -> KVShiftLlamaForCausalLM:
    """Return the model with this process's part of the weights. All processes must call this function.

    Args:
        model: the full model, in every process.
        checkpoint: folder of a checkpoint with the weights. None: use the weights of `model`.
        folder: folder of the run, which all processes must be able to read.
        processes: processes of the run.
    """
    part = folder.path / ".model.part"
    if checkpoint is None:
        processes.main_first(lambda: model.save_pretrained(part))
    with without_report():  # transformers warns that the plan also names QK-norm, which not every model has
        divided = KVShiftLlamaForCausalLM.from_pretrained(
            checkpoint or part,
            config=deepcopy(cast(Any, model.config)),
            dtype=torch.float32,
            distributed_config=DistributedConfig(tp_size=tensor_parallel_size(), tp_plan="auto"),
        )
    # Newer versions of Trainer refuse to save a model marked as distributed, but `RunTrainer` gathers all its parts.
    divided._is_distributed_loading_by_transformers = False
    for name, parameter in divided.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    divided.generation_config = model.generation_config
    processes.any_process(False)  # wait until all processes have read the weights
    if processes.is_main:
        remove_folder(part)
    return divided


def gather_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's `state_dict` gather the state of sharded parameters and `load_state_dict` shard it again.

    All processes must call these two methods together.
    """

    def gather(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {
            number: {name: gather_full(value) for name, value in state.items()}
            for number, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}

    def shard(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = {
            number: {name: _shard_like(parameters[number], value) for name, value in state.items()}
            for number, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(shard)


def _shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Shard a running mean of gradients like its parameter; return the step count, of another shape, unchanged."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    mesh = parameter.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
