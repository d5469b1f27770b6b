"""Run torchtitan 0.3.0 on CPU processes over gloo, with torch 2.13. Import this module before torchtitan.

It adds the functions that `torch.cuda` has and `torch.cpu` lacks; replaces FlexAttention, which has no backward on a
CPU, by SDPA, and the weighted sum, which gloo lacks, by a plain one; and gives pipeline schedules the arguments of
torch 2.14. None of this changes the shift.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._utils
import torch.nn.functional as F
from torch import Tensor

torch._utils._get_available_device_type = lambda: "cpu"
_PROPERTIES = types.SimpleNamespace(total_memory=8 << 30)
for _name, _value in {
    "set_device": lambda device: None,
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: _PROPERTIES,
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "manual_seed": torch.manual_seed,
}.items():
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _value)

import torch.distributed.tensor._random as dtensor_random  # noqa: E402
import torchtitan.config  # noqa: E402
import torchtitan.distributed.utils  # noqa: E402
import torchtitan.trainer  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.pipelining import schedules  # noqa: E402
from torch.nn.attention.flex_attention import create_mask  # noqa: E402
from torchtitan.config.override import derive  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

torchtitan.config.TORCH_DTYPE_MAP["float64"] = torch.float64  # torchtitan lists only float32 and bfloat16
dtensor_random.manual_seed = lambda seed, mesh=None: torch.manual_seed(seed)
torchtitan.distributed.utils.set_pg_timeouts = lambda **kwargs: None
attention._compiled_create_block_mask = attention.create_block_mask  # not compiled by Inductor

_set_factor = FSDPModule.set_gradient_divide_factor


def _set_factor_of_a_plain_sum(self: Any, factor: float) -> None:
    _set_factor(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = _set_factor_of_a_plain_sum


def _step_with_microbatches(stock: Callable) -> Callable:
    """Return a `step` that takes microbatches by name, as torchtitan passes them; torch does so from 2.14 on."""

    def step(
        self: Any,
        *args: Any,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
        return_outputs: bool = True,
        loss_kwargs: Any = None,
        **kwargs: Any,
    ) -> Any:
        if arg_mbs is kwarg_mbs is target_mbs is None:
            kwargs |= {"losses": losses, "return_outputs": return_outputs, "loss_kwargs": loss_kwargs}
            return stock(self, *args, **kwargs)
        stages = getattr(self, "_stages", None) or [self._stage]
        for stage in stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)
        return None

    return step


for _schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
    if "arg_mbs" not in _schedule.step.__code__.co_varnames:
        _schedule.step = _step_with_microbatches(_schedule.step)


class SDPA(FlexAttention):
    """FlexAttention computed by SDPA. With context parallelism there may be more keys than queries in its mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unused: Any,
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        mask = create_mask(attention_masks.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa).transpose(
            1, 2
        )


def with_sdpa(config: Any) -> Any:
    """Replace the attention of all layers in a trainer's configuration by `SDPA`; return the configuration."""
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = derive(layer.attention.inner_attention, SDPA.Config)
    return config
