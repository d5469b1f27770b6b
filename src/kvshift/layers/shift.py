"""`KVShift`, the module that contains the coefficients.

Shapes: B batch, T positions, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvshift.layers.options import Constraint, ShiftOptions, Target
from kvshift.ops import ShiftState
from kvshift.ops.arguments import Norms
from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.decode import CoefficientCache
from kvshift.ops.rope import Rotary

# The letters of the paper: alpha for keys, beta for values, and gamma for queries, the variant of its appendix G.
COEFFICIENT_NAMES: dict[str, str] = {"q": "gamma", "k": "alpha", "v": "beta"}


class KVShift(nn.Module):
    """Mixes keys and values (or queries) with those of the preceding tokens, using learned coefficients per head.

        k_hat[t] = alpha[:, 0] * k[t] + alpha[:, 1] * k[t-1] + ...
        v_hat[t] = beta[:, 0] * v[t] + beta[:, 1] * v[t-1] + ...
        q_hat[t] = gamma[:, 0] * q[t] + gamma[:, 1] * q[t-1] + ...

    Apply it after the projections and before QK-norm and rotary embedding. The arithmetic, and the rules for documents,
    padding and state, are those of `kvshift.kv_shift`.

    The coefficients are float32 parameters, and remain float32 when the model is cast to a smaller dtype: near 1,
    bfloat16 has steps of 0.004 to 0.008, so that updates at usual learning rates would be lost. (If something replaces
    the parameters, as `accelerate.load_checkpoint_and_dispatch` does with a dtype, the first call warns.) Exclude them
    from weight decay (see `kvshift.param_groups`), which would pull the coefficient of the current token to 0.

    Args:
        num_kv_heads: number of KV heads, G.
        options: which tensors are shifted, and how; see `ShiftOptions`.
        num_heads: number of query heads, H; required only if queries are shifted.
        device: device of the parameters.

    Attributes:
        alpha, beta, gamma: parameters, (G, W), (G, W) and (H, W), or None for targets that are not shifted. With
            "gate", they are the arguments of the sigmoid, (G, 1) and (H, 1).

    Source:
        Xu, Wang, Chen (ICML 2025): equation 5; QKV-shift: appendix G.
    """

    def __init__(
        self,
        num_kv_heads: int,
        options: ShiftOptions = ShiftOptions(),
        *,
        num_heads: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(options, ShiftOptions):
            raise TypeError(f"options must be ShiftOptions, got {type(options).__name__}")
        if num_kv_heads < 1:
            raise ValueError(f"num_kv_heads must be at least 1, got {num_kv_heads}")
        if "q" in options.targets and (num_heads is None or num_heads < 1):
            raise ValueError(f'num_heads must be at least 1 when "q" is in targets, got {num_heads}')
        self.options = options
        self.targets = options.targets  # copied from the options, as it is read at every token
        self._coefficient_cache = CoefficientCache()
        for target, name in COEFFICIENT_NAMES.items():
            heads = num_heads if target == "q" else num_kv_heads
            width = 1 if options.constraint == "gate" else options.window
            parameter = None
            if target in options.targets:
                parameter = nn.Parameter(torch.empty(cast(int, heads), width, dtype=torch.float32, device=device))
            self.register_parameter(name, parameter)
        self.register_load_state_dict_pre_hook(_load_in_float32)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise the parameters again."""
        with torch.no_grad():
            for name, start in self.start_values(generator).items():
                getattr(self, name).copy_(start)

    def start_values(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return newly drawn initial values of the parameters, by name."""
        return {
            name: _start_values(parameter, self.options, generator)
            for name, parameter in self.named_parameters(recurse=False)
        }

    def coefficients(self) -> dict[str, Tensor]:
        """Return the current coefficients by target, {"k": (G, W), "v": (G, W), "q": (H, W)}; differentiable."""
        return {target: cast(Tensor, self._mix(target)) for target in self.targets}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: ShiftState | None = None,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        mask: Tensor | None = None,
        rotary: Rotary | None = None,
        norms: Norms | None = None,
        keep_state: bool = True,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor, Tensor, ShiftState | None]:
        """Shift the targets, which may be any of q, k and v. Then normalise and rotate q and k, if requested.

        Args:
            q, k, v: projections, not yet normalised or rotated, (B, T, H, D), (B, T, G, D) and (B, T, G, Dv).
            state, cu_seqlens, seq_idx, mask, backend: as in `kvshift.kv_shift`.
            rotary: tables with which q and k are rotated last (see `kvshift.ops.rope.apply_rotary`).
            norms: QK-norms of q and k, applied between shift and rotation: modules like `torch.nn.RMSNorm`. On a GPU,
                norm and rotation share one pass over memory with the shift.
            keep_state: False if no later call continues from the new state.

        Returns:
            q, k, v and the new state, which is None if `targets` is empty or the state is not kept. The state may share
            memory with the k and v that were passed in, so do not overwrite these tensors with the next token.
        """
        gamma = self._mix("q") if "q" in self.targets else None
        return shift_norm_rope(
            q, k, v, self._mix("k"), self._mix("v"), gamma, rotary=rotary, norms=norms, state=state,
            cu_seqlens=cu_seqlens, seq_idx=seq_idx, mask=mask, keep_state=keep_state, backend=backend,
            coefficient_cache=self._coefficient_cache,
        )  # fmt: skip  # type: ignore[return-value]  # queries were given

    def coefficients_alone(self) -> tuple[nn.Parameter | None, nn.Parameter | None] | None:
        """Return alpha and beta if `forward` with a state is their formula, with a window of 2, and nothing else.

        Returns None for hooks, subclasses, parametrized and constrained coefficients, and shifted queries. For the next
        token of generation, whose kernel reads the parameters.
        """
        options, parameters = self.options, self._parameters
        if (
            type(self) is not KVShift  # a parametrization changes the class
            or options.window != 2
            or options.constraint != "free"
            or "q" in self.targets
            or self._forward_hooks
            or self._forward_pre_hooks
            or "forward" in self.__dict__
            or "alpha" not in parameters
            or "beta" not in parameters
        ):
            return None
        return parameters["alpha"], parameters["beta"]  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return repr(self.options).removeprefix("ShiftOptions(").removesuffix(")")

    def _mix(self, target: Target) -> Tensor | None:
        """Return the current coefficients of one target, (heads, W); None if it is not shifted."""
        name = COEFFICIENT_NAMES[target]
        # Module.__getattr__ is slow, at every token; a parametrized parameter is only found as an attribute.
        parameter: Any = self._parameters[name] if name in self._parameters else getattr(self, name)
        if parameter is None:
            return None
        if parameter.dtype.itemsize < 4 and not torch.compiler.is_compiling():
            _warn_rounded(parameter.dtype)
        if self.options.constraint == "free" and type(parameter) is nn.Parameter:
            return parameter
        if hasattr(parameter, "to_local"):  # tensor parallelism shards it like the heads
            parameter = parameter.to_local()
        return constrain(parameter, self.options.constraint)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KVShift:
        """Apply every move and cast of the model, except casts to a dtype smaller than float32."""

        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or not moved.is_floating_point() or moved.dtype.itemsize >= 4:
                return moved
            return tensor.to(device=moved.device, dtype=torch.float32)

        return super()._apply(keep_float32, recurse)


def constrain(parameter: Tensor, constraint: Constraint) -> Tensor:
    """Return the coefficients that result from a parameter, (heads, W); see `ShiftOptions`.

    Args:
        parameter: (heads, W), or (heads, 1) with "gate".
    """
    if constraint == "gate":
        now = torch.sigmoid(parameter)
        return torch.cat([now, 1 - now], dim=1)
    if constraint == "clamp":
        # This gives the bounds a gradient in every version. From torch 2.15 on, `clamp` gives them none, and a
        # coefficient that `clamp_after_step` set to 0 or 1 would stay there forever.
        inside = (parameter >= 0) & (parameter <= 1)
        return torch.where(inside, parameter, parameter.detach().clamp(0, 1))
    return parameter


def require_targets(module: nn.Module) -> None:
    """Raise a TypeError for a module that replaces a `KVShift` and hides its attributes, such as `targets`."""
    if not hasattr(module, "targets"):
        raise TypeError(
            f"shift must be a KVShift, got a {type(module).__name__}. PEFT's target_parameters cannot adapt its "
            'coefficients; train them directly: modules_to_save=["shift"]'
        )


@cache
def _warn_rounded(dtype: torch.dtype) -> None:
    """Warn once per process and dtype that the coefficients are not in float32."""
    warnings.warn(
        f"the coefficients of a KV shift are {dtype}: something has replaced the float32 parameters. They are rounded "
        "(bfloat16 has steps of 0.004 to 0.008 near 1), and training in this dtype loses small updates. "
        "from_pretrained(..., dtype=, device_map=) and model.to(dtype) keep them in float32",
        stacklevel=4,
    )


def _start_values(like: Tensor, options: ShiftOptions, generator: torch.Generator | None) -> Tensor:
    heads, window = like.shape[0], options.window
    if options.init == "identity":
        return torch.eye(1, window, device=like.device).expand(heads, -1)
    drawn = torch.rand(heads, window - 1, dtype=torch.float32, device=like.device, generator=generator)
    if options.constraint == "gate":
        return torch.logit(drawn, eps=1e-6)
    return torch.cat([drawn, 1 - drawn.sum(1, keepdim=True)], dim=1)


def _load_in_float32(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cast loaded coefficients of a smaller dtype to float32, which `assign=True` would not do."""
    for name in dict(module.named_parameters(recurse=False)):
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, Tensor) and loaded.is_floating_point() and loaded.dtype.itemsize < 4:
            state_dict[prefix + name] = loaded.float()
