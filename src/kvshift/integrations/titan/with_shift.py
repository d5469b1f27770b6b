"""KV shift in a configuration of torchtitan's trainer: model, parallelism and checkpoints."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.optim import Optimizer
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.trainer import Trainer

from kvshift.integrations.titan.hf_adapter import ShiftStateDictAdapter
from kvshift.integrations.titan.shifted_gqa import find_shifts, shifted_attention
from kvshift.layers.halo import Layout
from kvshift.layers.options import ShiftOptions

_LAYOUTS: dict[str | None, Layout] = {None: "contiguous", "headtail": "headtail"}


def with_kv_shift(config: Trainer.Config, options: ShiftOptions = ShiftOptions()) -> Trainer.Config:
    """Add a shift to every attention in a configuration of Llama 3 or dense Qwen 3, in place.

    Coefficients are excluded from weight decay, which would pull that of the current token to 0, and with
    `constraint="clamp"` they are clamped to [0, 1] after each step of the optimizer.

    Replacing the attention with `--override.imports` would not be enough: the optimizer is changed as above, the shift
    needs the process group of context parallelism, and torchtitan's own state-dict adapter would drop the
    coefficients. Your own configuration registry only needs

        def my_model():
            return with_kv_shift(llama3_8b(), ShiftOptions(window=3))

    Args:
        config: a configuration of torchtitan, not yet built; it is changed.
        options: what to shift, and how.

    Returns:
        The same configuration.

    Raises:
        ValueError: the model is not a Llama 3 or Qwen 3, or already has a shift.
    """
    spec = config.model_spec
    if spec is None or type(spec.model) not in (Llama3Model.Config, Qwen3Model.Config):
        found = None if spec is None else type(spec.model).__qualname__
        raise ValueError(f"config must be that of a Llama 3 or Qwen 3 model, got {found}")
    for layer in spec.model.layers:
        layer.attention = shifted_attention(layer.attention, options)
    config.model_spec = dataclasses.replace(
        spec,
        parallelize_fn=_parallelize(spec.parallelize_fn),
        post_optimizer_build_fn=_prepare_optimizers(spec.post_optimizer_build_fn, clamp=options.constraint == "clamp"),
        state_dict_adapter=ShiftStateDictAdapter,
    )
    return config


def _prepare_optimizers(stock: Callable[..., None] | None, *, clamp: bool) -> Callable[..., None]:
    def prepare(optimizers: Any, model_parts: Sequence[nn.Module], parallel_dims: Any) -> None:
        if stock is not None:
            stock(optimizers, model_parts, parallel_dims)
        coefficients = [parameter for shift in find_shifts(model_parts) for parameter in shift.parameters()]
        for optimizer in optimizers:
            for group in list(optimizer.param_groups):
                _exclude_from_decay(optimizer, group, {id(parameter) for parameter in coefficients})
        if clamp:
            optimizers.register_step_post_hook(lambda *_: _clamp(coefficients))

    return prepare


def _exclude_from_decay(optimizer: Optimizer, group: dict[str, Any], coefficients: set[int]) -> None:
    """Move the coefficients in a parameter group to a new group without weight decay.

    A parameter group in torchtitan's configuration would raise an error in a pipeline stage without attention.
    """
    moved = [id(parameter) in coefficients for parameter in group["params"]]
    if not any(moved) or not group.get("weight_decay"):
        return
    if all(moved):
        group["weight_decay"] = 0.0
        return
    settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    without_decay: dict[str, Any] = settings | {"weight_decay": 0.0}
    for key in ("params", "param_names"):
        without_decay[key] = list(compress(group[key], moved))
        group[key] = list(compress(group[key], [not each for each in moved]))
    optimizer.add_param_group(without_decay)


@torch.no_grad()
def _clamp(parameters: Sequence[Tensor]) -> None:
    """Clamp the parameters to [0, 1], as `kvshift.clamp_after_step` does."""
    for parameter in parameters:
        parameter.clamp_(0, 1)


def _parallelize(stock: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def parallelize(model: nn.Module, *, parallel_dims: Any, parallelism: Any, **rest: Any) -> nn.Module:
        too_old = Version(torch.__version__).release < (2, 14)
        if parallel_dims.spmd_backend == "spmd_types" and parallel_dims.world_size > 1 and too_old:
            raise NotImplementedError(
                f"parallelism.spmd_backend must be partial_dtensor with torch {torch.__version__}, got 'spmd_types', "
                "which needs torch 2.14 on several processes"
            )
        if parallel_dims.pp_enabled and "arg_mbs" not in inspect.signature(PipelineScheduleSingle.step).parameters:
            raise NotImplementedError(
                f"parallelism.pipeline_parallel_degree must be 1 with torch {torch.__version__}, got "
                f"{parallelism.pipeline_parallel_degree}: torchtitan's pipeline schedules need torch 2.14"
            )
        if parallel_dims.cp_enabled:
            balancer = parallelism.context_parallel_load_balancer
            if balancer not in _LAYOUTS:
                raise NotImplementedError(
                    f"parallelism.context_parallel_load_balancer must be headtail or None with KV shift, got "
                    f"{balancer!r}: the shift knows the order of tokens only for these"
                )
            for shift in find_shifts(model):
                shift.group, shift.layout = parallel_dims.get_mesh("cp").get_group(), _LAYOUTS[balancer]
        return stock(model, parallel_dims=parallel_dims, parallelism=parallelism, **rest)

    return parallelize
