"""Implementations of the shift of keys and values: those of this package, and others to compare them with.

Shapes: B batch, T positions, G KV heads, D head size, C = G D channels, W window (2 here).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvshift.layers.positions import rotary_table
from kvshift.ops import BACKENDS, kv_shift
from kvshift.ops.arguments import Call
from kvshift.ops.boundaries import shared_plans
from kvshift.ops.rope import half_tables, rotate_half
from kvshift.ops.triton.call import shift_triton, triton_unsupported_reason

Pair = tuple[Tensor, Tensor]
Table = tuple[Tensor, Tensor]
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Pair]


@dataclass(frozen=True, kw_only=True)
class Formulation:
    """One implementation of the operator.

    Attributes:
        name: name in the rows.
        function: (k, v, alpha, beta) -> (k_hat, v_hat), with coefficients in the form that `weights` returns.
        weights: converts coefficients (G, 2) in float32, given k, to the form that `function` takes.
        coefficient_grad: converts a gradient of that form, given G, to the gradient of the coefficients (G, 2).
        roundings: how many times a result is rounded to the dtype of k on its way: 1 if sums are in float32.
        fixed: the coefficients (current, previous) if they cannot be changed; they then have no gradient.
        computes: what it computes if that is not the plain shift.
        boundaries: `seq_idx` or `mask` of `kv_shift`, (B, T).
        left_out: why it cannot run here, or None.
    """

    name: str
    function: Function
    weights: Callable[[Tensor, Tensor], Tensor] = lambda coefficients, k: coefficients
    coefficient_grad: Callable[[Tensor, int], Tensor] = lambda grad, heads: grad
    roundings: int = 1
    fixed: tuple[float, float] | None = None
    computes: str | None = None
    boundaries: Mapping[str, Tensor] = field(default_factory=dict)
    left_out: str | None = None


def kv_shift_function(backend: str, **boundaries: Any) -> Function:
    """Return `kv_shift` as a user calls it, with k and v together."""

    def shift(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Pair:
        return kv_shift(k, v, alpha, beta, backend=backend, **boundaries)[:2]

    return shift


_DOCUMENT = 25  # tokens; chosen so that no document begins where `parity.py` cuts a slice


def _with_boundaries(k: Tensor) -> list[Formulation]:
    """Return `kv_shift` with documents of equal length, and with row b left-padded by b + 1 tokens (at most half)."""
    batch, positions = k.shape[:2]
    position_T = torch.arange(positions, device=k.device)
    documents = (position_T // _DOCUMENT).expand(batch, -1)
    pads_B1 = torch.arange(1, batch + 1, device=k.device).clamp(max=positions // 2)[:, None]
    found: dict[str, dict[str, Tensor]] = {
        "documents": {"seq_idx": documents},
        "left padding": {"mask": position_T >= pads_B1},
    }
    return [
        Formulation(name=f"kv_shift, {name}{suffix}", function=function, computes=computes, boundaries=boundaries)
        for name, boundaries in found.items()
        for suffix, function, computes in (
            ("", kv_shift_function("auto", **boundaries), f"kv_shift with {name}"),
            (
                ", plan kept",
                _in_a_later_layer(kv_shift_function("auto", **boundaries)),
                f"kv_shift with {name}, its plan kept",
            ),
        )
    ]


def _in_a_later_layer(function: Function) -> Function:
    """Return `function` with the first call's plan of the boundaries: a model makes the plan once for all layers."""
    plans: dict[Any, Any] = {}

    def shift(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Pair:
        with shared_plans(plans):
            return function(k, v, alpha, beta)

    return shift


def on_keys_and_values(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """Return a function of k and v that applies a function of one tensor to each."""

    def shift(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Pair:
        return function(k, alpha), function(v, beta)

    return shift


def appendix_m(x: Tensor, coefficients: Tensor) -> Tensor:
    """Shift as in the paper's appendix M: pad, unfold, multiply, sum. Its kernel has the oldest lag first."""
    windows = F.pad(x, (0, 0, 0, 0, coefficients.shape[1] - 1, 0)).unfold(1, coefficients.shape[1], 1)
    return (windows * coefficients.flip(1)[:, None, :]).sum(-1)


def pad_multiply_add(x: Tensor, coefficients: Tensor) -> Tensor:
    """Shift by the two lines that most people would write."""
    before = F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1]
    return x * coefficients[:, 0, None] + before * coefficients[:, 1, None]


def cast(coefficients: Tensor, k: Tensor) -> Tensor:
    """Cast coefficients to the dtype of k, in which plain formulations compute; those of `kv_shift` stay in float32."""
    return coefficients.to(k.dtype)


def per_channel(coefficients: Tensor, k: Tensor) -> Tensor:
    """Expand coefficients (G, 2) to convolution weights (C, 2), with the oldest lag first."""
    return coefficients.flip(1).repeat_interleave(k.shape[3], dim=0).to(k.dtype)


def per_head(grad: Tensor, heads: int) -> Tensor:
    """Sum gradients of convolution weights (C, 2) to gradients of coefficients (G, 2); see `per_channel`."""
    return grad.unflatten(0, (heads, -1)).float().sum(1).flip(1)


def formulations_without_rotary(k: Tensor, compiled: bool) -> list[Formulation]:
    """Return all formulations for tensors like k, (B, T, G, D), without a rotary embedding; plain ones first."""
    plain = Formulation(
        name="pad, multiply, add", function=on_keys_and_values(pad_multiply_add), weights=cast, roundings=3
    )
    shift = Formulation(name="kv_shift", function=kv_shift_function("auto"))
    found = [
        Formulation(name="appendix M", function=on_keys_and_values(appendix_m), weights=cast, roundings=3),
        plain,
        _by_compiler(plain, compiled),
        *_other_packages(k),
        shift,
        *_with_boundaries(k),
    ]
    for backend in BACKENDS:
        if backend not in ("auto", "reference"):
            refusal = _unsupported_reason(backend, k)
            found.append(
                Formulation(name=f"kv_shift, {backend}", function=kv_shift_function(backend), left_out=refusal)
            )
    return [*found, _by_compiler(shift, compiled)]


def _by_compiler(formulation: Formulation, compiled: bool) -> Formulation:
    name = f"{formulation.name}, compiled"
    if not compiled:
        return replace(formulation, name=name, left_out="torch.compile is not measured: preset smoke or --no-compile")
    return replace(formulation, name=name, function=torch.compile(formulation.function, dynamic=False))


def _unsupported_reason(backend: str, k: Tensor) -> str | None:
    """Return why a backend does not take tensors like k, or None if it does."""
    if backend == "triton" and not k.is_cuda:  # Triton's interpreter would accept them
        return "needs a CUDA device"
    coefficients = torch.ones(k.shape[2], 2, device=k.device)
    few = k.detach()[:1, :2]
    try:
        kv_shift(few, few, coefficients, coefficients, backend=backend)
    except (ValueError, ImportError) as error:
        return str(error)
    return None


def _other_packages(k: Tensor) -> list[Formulation]:
    """Return the depthwise convolutions of width 2 and the token shift of other packages."""

    def refusal(package: str) -> str | None:
        if not k.is_cuda:
            return "needs a CUDA device"
        return None if find_spec(package) is not None else "not installed"

    convolution = Formulation(
        name="causal-conv1d",
        function=on_keys_and_values(_causal_conv1d),
        weights=per_channel,
        coefficient_grad=per_head,
        roundings=3,
        computes="depthwise convolution of width 2, coefficients per channel",
        left_out=refusal("causal_conv1d"),
    )
    of_fla: dict[str, Any] = {"left_out": refusal("fla")}
    return [
        convolution,
        replace(convolution, name="fla ShortConvolution", function=on_keys_and_values(_short_convolution), **of_fla),
        Formulation(
            name="fla token_shift",
            function=on_keys_and_values(_token_shift),
            weights=cast,
            roundings=3,
            fixed=(-1.0, 1.0),
            computes="x[t-1] - x[t]: no coefficients",
            **of_fla,
        ),
    ]


def _causal_conv1d(x: Tensor, weight: Tensor) -> Tensor:
    from causal_conv1d import causal_conv1d_fn  # pyright: ignore[reportMissingImports]

    return causal_conv1d_fn(x.flatten(2).transpose(1, 2), weight).transpose(1, 2).view(x.shape)


@functools.cache
def _convolution(channels: int, dtype: torch.dtype, device: torch.device) -> Any:
    from fla.modules import ShortConvolution  # pyright: ignore[reportMissingImports]

    module: nn.Module = ShortConvolution(channels, 2, bias=False, activation=None, device=device, dtype=dtype)
    del module._parameters["weight"]  # the caller sets its own weight
    return module


def _short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    module = _convolution(weight.shape[0], x.dtype, x.device)
    module.weight = weight.unsqueeze(1)
    return module(x.flatten(2))[0].view(x.shape)


def _token_shift(x: Tensor, _: Tensor) -> Tensor:
    from fla.modules.token_shift import token_shift  # pyright: ignore[reportMissingImports]

    return token_shift(x.flatten(2)).view(x.shape)


def rotary_tables(length: int, size: int, dtype: torch.dtype, device: torch.device) -> Table:
    """Return cosines and sines as a model passes them to its layers, (1, T, 1, D), in the dtype of k."""
    cos, sin = rotary_table(torch.arange(length, device=device).unsqueeze(0), size, 10_000.0, torch.float32)
    whole = [torch.cat([part, part], dim=-1).squeeze(2).to(dtype) for part in (cos, sin)]
    return half_tables(*whole)


def then_rotate(function: Function, table: Table) -> Function:
    """Return `function` followed by a separate rotation of k."""

    def shift(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Pair:
        k_hat, v_hat = function(k, v, alpha, beta)
        return rotate_half(k_hat, table), v_hat

    return shift


def formulations_with_rotary(table: Table, compiled: bool) -> list[Formulation]:
    """Return the formulations of shift and rotary embedding; the first, without a shift, is their lower bound."""

    def unshifted(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Pair:
        return k, v.clone()  # v must be read and written at least once

    alone = Formulation(
        name="rotary embedding, v copied",
        function=then_rotate(unshifted, table),
        roundings=4,
        fixed=(1.0, 0.0),
        computes="no shift",
    )
    both = Formulation(
        name="kv_shift, then rotary", function=then_rotate(kv_shift_function("auto"), table), roundings=4
    )
    refusal = triton_unsupported_reason(table[0], 2) if table[0].is_cuda else "needs a CUDA device"
    launches = [replace(one, left_out=refusal) for one in fused_formulations(table)]
    return [alone, both, _by_compiler(alone, compiled), _by_compiler(both, compiled), *launches]


def fused_formulations(table: Table) -> list[Formulation]:
    """Return the formulations by the Triton kernel of attention layers, without and with the shift."""
    cos, sin = (part.squeeze(2) for part in table)
    half = cos.shape[2] // 2
    halves = cos[..., :half], sin[..., half:]  # the first half of sin is negated

    def rotated(k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Pair:
        call = Call(None, k, v, alpha, beta, cos=halves[0], sin=halves[1], max_rows=0)
        results: Any = shift_triton(call)
        return results[1:3]

    def unshifted(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Pair:
        return rotated(k, v.clone(), None, None)

    alone = Formulation(
        name="rotary embedding, v copied, triton", function=unshifted, fixed=(1.0, 0.0), computes="no shift"
    )
    return [alone, Formulation(name="kv_shift and rotary in one launch, triton", function=rotated)]
