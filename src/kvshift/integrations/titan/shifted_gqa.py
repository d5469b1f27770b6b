"""torchtitan's grouped-query attention with a shift of keys and values, for all its kinds of parallelism.

Shapes: B batch, L tokens, N heads, H head size, W window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torchtitan.config.override import derive
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from kvshift.layers.halo import Layout, shift_shard
from kvshift.layers.options import ShiftOptions
from kvshift.layers.shift import COEFFICIENT_NAMES, KVShift, constrain
from kvshift.ops.attention_inputs import shift_norm_rope


class TitanShift(Module):
    """`kvshift.KVShift` for torchtitan: the coefficients, and the shift of raw keys, values and queries.

    Coefficients are (W, N), the transpose of those in `KVShift`: tensor parallelism shards their last dimension, FSDP
    the first. (With heads first, both would shard the first one, and torch 2.13 cannot distribute few heads that way.)

    Attributes:
        alpha, beta, gamma: (W, N) parameters for keys, values and queries, as far as they are in `options.targets`;
            (1, N) with the constraint "gate".
        group, layout: process group of context parallelism (None without it), and how it divides sequences.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Numbers of heads, and the options of the shift."""

        n_heads: int
        n_kv_heads: int
        options: ShiftOptions = ShiftOptions()

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.options = config.options
        width = 1 if self.options.constraint == "gate" else self.options.window
        for target in self.options.targets:
            heads = config.n_heads if target == "q" else config.n_kv_heads
            self.register_parameter(COEFFICIENT_NAMES[target], nn.Parameter(torch.empty(width, heads)))
        self.group: dist.ProcessGroup | None = None
        self.layout: Layout = "contiguous"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Shift the targets and return the others unchanged.

        Args:
            q, k, v: (B, L, N, H), this rank's heads and tokens; DTensors where torchtitan uses them.
            positions: (B, L) or (1, L), counted from 0 in each document; None: each row is one document.

        Returns:
            q, k and v.
        """
        parameters = {
            target: _local_heads(getattr(self, COEFFICIENT_NAMES[target]), k) for target in self.options.targets
        }
        if not isinstance(k, DTensor):
            return self._shift_local(q, k, v, parameters, positions)
        if isinstance(positions, DTensor):
            positions = positions.to_local()
        shifted = self._shift_local(*(x.to_local() for x in (q, k, v)), parameters, positions)  # type: ignore[attr-defined]
        return tuple(
            DTensor.from_local(y, like.device_mesh, like.placements, run_check=False)
            for like, y in zip(cast(tuple[DTensor, ...], (q, k, v)), shifted, strict=True)
        )  # type: ignore[return-value]

    def _shift_local(
        self, q: Tensor, k: Tensor, v: Tensor, parameters: dict[str, Tensor], positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixes = {t: constrain(parameter.t(), self.options.constraint) for t, parameter in parameters.items()}
        gamma, alpha, beta = (mixes.get(target) for target in ("q", "k", "v"))
        if self.group is not None:
            moved = q if gamma is not None else None
            shard: dict[str, Any] = {"positions": positions, "group": self.group, "layout": self.layout}
            q_hat, k_hat, v_hat = shift_shard(k, v, alpha, beta, q=moved, gamma=gamma, **shard)
            return q if q_hat is None else q_hat, k_hat, v_hat
        documents = None if positions is None else (positions == 0).cumsum(1).expand(k.shape[0], -1)
        q_hat, k_hat, v_hat, _ = shift_norm_rope(q, k, v, alpha, beta, gamma, seq_idx=documents, keep_state=False)
        return q_hat, k_hat, v_hat  # type: ignore[return-value]  # queries were given


def _local_heads(parameter: Tensor, activation: Tensor) -> Tensor:
    """Return this rank's heads of a parameter. If ranks see different tokens, each has a partial gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    if not isinstance(activation, DTensor):
        return parameter.to_local()
    split = dict(zip(activation.device_mesh.mesh_dim_names or (), activation.placements, strict=True))
    names = parameter.device_mesh.mesh_dim_names or ()
    gradient = [
        Partial() if isinstance(split.get(name), Shard) and split[name].dim < 2 else placement  # type: ignore[attr-defined]
        for name, placement in zip(names, parameter.placements, strict=True)
    ]
    return parameter.to_local(grad_placements=gradient)


class ShiftedGQAttention(GQAttention):
    """`GQAttention` whose raw queries, keys and values are shifted before QK-norm and RoPE."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        """The configuration of `GQAttention`, and that of the shift."""

        shift: TitanShift.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shift = config.shift.build()

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelise as `GQAttention` does. Context parallelism requires that the shift has its process group."""
        if parallel_dims.cp_enabled and self.shift.group is None:
            raise NotImplementedError("context parallelism with KV shift needs a configuration made by with_kv_shift")
        super().parallelize(parallel_dims)

    def forward(self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        """Compute attention as `GQAttention.forward` of torchtitan 0.3.0, with one additional line for the shift."""
        q, k, v = self.qkv_linear(x_BLD)
        q, k, v = self.shift(q, k, v, positions)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, positions)
        out = self.inner_attention(
            q, k, v, attention_masks=attention_masks, scale=self.scaling, enable_gqa=self.enable_gqa
        )
        return self.wo(out.contiguous().flatten(2))


def shifted_attention(config: GQAttention.Config, options: ShiftOptions) -> ShiftedGQAttention.Config:
    """Return the configuration of this attention with a shift.

    Raises:
        ValueError: the attention already has a shift, or is not a `GQAttention`.
    """
    if type(config) is not GQAttention.Config:
        raise ValueError(f"attention must be a GQAttention.Config of torchtitan, got {type(config).__qualname__}")
    by_head = dense_param_placement(tp=spmd.S(1))
    names = [COEFFICIENT_NAMES[target] for target in options.targets]
    shift = TitanShift.Config(
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads or config.n_heads,
        options=options,
        param_init=dict.fromkeys(names, partial(_init_parameter, options=options)),
        sharding_config=ShardingConfig(state_shardings=dict.fromkeys(names, by_head)),
    )
    return derive(config, ShiftedGQAttention.Config, shift=shift)


def _init_parameter(parameter: Tensor, *, options: ShiftOptions) -> None:
    """Initialise a parameter. Each rank draws all heads and keeps its part, so values do not depend on the mesh."""
    one = dataclasses.replace(options, targets=("k",))
    (whole,) = KVShift(parameter.shape[1], one, device=parameter.device).parameters()
    drawn = whole.detach().t().contiguous().to(parameter.dtype)
    if isinstance(parameter, DTensor):
        drawn = distribute_tensor(drawn, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        parameter.copy_(drawn)


def find_shifts(model_parts: Sequence[nn.Module] | nn.Module) -> list[TitanShift]:
    """Return the shifts of a model, or of the model parts on one rank of a pipeline."""
    parts = [model_parts] if isinstance(model_parts, nn.Module) else model_parts
    return [module for part in parts for module in part.modules() if isinstance(module, TitanShift)]
