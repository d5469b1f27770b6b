"""The module that owns the coefficients.

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

# The paper's letters: alpha mixes keys, beta values; queries are the variant of its appendix G.
COEFFICIENT_NAMES: dict[str, str] = {"q": "gamma", "k": "alpha", "v": "beta"}


class KVShift(nn.Module):
    """Mixes keys and values (or queries) with those of the tokens before, by learned numbers per head.

        k_hat[t] = alpha[:, 0] * k[t] + alpha[:, 1] * k[t-1] + ...
        v_hat[t] = beta[:, 0] * v[t] + beta[:, 1] * v[t-1] + ...
        q_hat[t] = gamma[:, 0] * q[t] + gamma[:, 1] * q[t-1] + ...

    Apply it after the projections and before QK-norm and rotary embedding. The arithmetic and all rules for documents,
    padding and state are those of `kvshift.kv_shift`.

    Coefficients are float32 parameters and stay so when the model is cast to a smaller dtype: near 1, bfloat16 has
    steps of 0.004 to 0.008, and the updates of a usual learning rate would be lost. (If something replaces
    them, as `accelerate.load_checkpoint_and_dispatch` does with a dtype, the first call warns.) Exclude them from
    weight decay (`kvshift.param_groups`), which would pull the coefficient of the current token to 0.

    Args:
        num_kv_heads: G.
        options: what is shifted, and how; see `ShiftOptions`.
        num_heads: H; needed only if queries are shifted.
        device: device of the parameters.

    Attributes:
        alpha, beta, gamma: (G, W), (G, W) and (H, W) parameters, or None where that target is not shifted; (G, 1)
            and (H, 1) with "gate", the argument of the sigmoid.

    Source:
        Equation 5; QKV-shift: appendix G.
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
        self.targets = options.targets  # beside them, as every token asks for it
        self._kept = CoefficientCache()
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
        """Draw the start values again."""
        with torch.no_grad():
            for name, start in self.start_values(generator).items():
                getattr(self, name).copy_(start)

    def start_values(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Start values of the parameters, by name; drawn again at each call."""
        return {
            name: _start_values(parameter, self.options, generator)
            for name, parameter in self.named_parameters(recurse=False)
        }

    def coefficients(self) -> dict[str, Tensor]:
        """The current coefficients, by target: {"k": (G, W), "v": (G, W), "q": (H, W)}; differentiable."""
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
        """Shift the targets and return the others unchanged. Then normalise and rotate q and k, if requested.

        Args:
            q: (B, T, H, D), k: (B, T, G, D), v: (B, T, G, Dv): projected, not yet normalised or rotated.
            state, cu_seqlens, seq_idx, mask, backend: as in `kvshift.kv_shift`.
            rotary: tables by which q and k are rotated last (`kvshift.ops.rope.apply_rotary`).
            norms: QK-norm of q and of k, between shift and rotation: modules like `torch.nn.RMSNorm`. What is done here
                after the shift can share one pass over memory with it; on a GPU it does.
            keep_state: False if no other call continues from here.

        Returns:
            q, k, v and the new state (None if `targets` is empty or it is not kept). The state may share memory with
            the k and v that were passed in: do not reuse these tensors for the next token.
        """
        gamma = self._mix("q") if "q" in self.targets else None
        return shift_norm_rope(
            q, k, v, self._mix("k"), self._mix("v"), gamma, rotary=rotary, norms=norms, state=state,
            cu_seqlens=cu_seqlens, seq_idx=seq_idx, mask=mask, keep_state=keep_state, backend=backend,
            kept=self._kept,
        )  # fmt: skip  # type: ignore[return-value]  # queries were given

    def extra_repr(self) -> str:
        return repr(self.options).removeprefix("ShiftOptions(").removesuffix(")")

    def _mix(self, target: Target) -> Tensor | None:
        """The coefficients in force for one target, (heads, W)."""
        name = COEFFICIENT_NAMES[target]
        # Module.__getattr__ takes long, at every token; a parametrized one is an attribute alone.
        parameter: Any = self._parameters[name] if name in self._parameters else getattr(self, name)
        if parameter is None:
            return None
        if parameter.dtype.itemsize < 4 and not torch.compiler.is_compiling():
            _warn_rounded(parameter.dtype)
        if self.options.constraint == "free" and type(parameter) is nn.Parameter:
            return parameter
        if hasattr(parameter, "to_local"):  # sharded like the heads by tensor parallelism: this rank's part
            parameter = parameter.to_local()
        return constrain(parameter, self.options.constraint)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KVShift:
        """Follow every move and cast of the model except one to a dtype smaller than float32."""

        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or not moved.is_floating_point() or moved.dtype.itemsize >= 4:
                return moved
            return tensor.to(device=moved.device, dtype=torch.float32)

        return super()._apply(keep_float32, recurse)


def constrain(parameter: Tensor, constraint: Constraint) -> Tensor:
    """The coefficients in force, (heads, W), of a parameter; see `ShiftOptions`.

    Args:
        parameter: (heads, W); (heads, 1) with "gate".
    """
    if constraint == "gate":
        now = torch.sigmoid(parameter)
        return torch.cat([now, 1 - now], dim=1)
    if constraint == "clamp":
        # The bounds have a gradient here, in every version. `clamp` gives them none from torch 2.15 on, and a
        # coefficient that `clamp_after_step` brought to 0 or 1 would stay there for good.
        inside = (parameter >= 0) & (parameter <= 1)
        return torch.where(inside, parameter, parameter.detach().clamp(0, 1))
    return parameter


def shift_type_error(module: nn.Module) -> TypeError:
    """For a layer that stands in place of a `KVShift` and does not let its attributes, `targets` say, be seen."""
    return TypeError(
        f"shift must be a KVShift, got a {type(module).__name__}. PEFT's target_parameters cannot adapt its "
        'coefficients; train them directly: modules_to_save=["shift"]'
    )


@cache
def _warn_rounded(dtype: torch.dtype) -> None:
    """Once in a process."""
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
    """A checkpoint in bfloat16 loads into float32 parameters, with `assign=True` too."""
    for name in dict(module.named_parameters(recurse=False)):
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, Tensor) and loaded.is_floating_point() and loaded.dtype.itemsize < 4:
            state_dict[prefix + name] = loaded.float()
