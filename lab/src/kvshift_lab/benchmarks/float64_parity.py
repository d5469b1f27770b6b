"""Comparison of an implementation with the same module in float64, with the reference shift.

The implementation runs at the shapes that are timed and is checked on a slice of the first rows and positions. That is
enough because layers are causal and gradients are those of a loss over the slice alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvshift.layers import KVShift

SLICE = (slice(0, 2), slice(0, 32))  # rows, positions

# Relative to the norm of a tensor: matrix products amplify and accumulate rounding errors over layers. A shift that is
# wrong at one position of 32 has an error of 0.2.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def to_reference(module: Any) -> Any:
    """Convert a module to float64 and its shifts to the reference, in place."""
    return use_backend("reference", module.double())


def use_backend(backend: str, module: Any) -> Any:
    """Make every shift of a module use one backend, without recomputation in backward; in place."""
    for part in module.modules():
        if isinstance(part, KVShift):
            part.forward = functools.partial(part.forward, backend=backend)
    return module


def compare_tensors(found: Mapping[str, Tensor], exact: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Return "problem", the first tensor whose error relative to its norm is too large, and "worst_error", the largest.

    The error of a tensor that is nearly zero compared with the others, such as the gradient of an unimportant bias, is
    relative to a hundredth of the largest norm of its kind; all gradients are one kind.
    """
    largest: dict[str, float] = {}
    for name, value in exact.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), float(value.norm()))
    worst, problem = 0.0, None
    for name, value in exact.items():
        error = float((found[name].double() - value).norm())
        error /= max(float(value.norm()), largest[_kind(name)] / 100) or 1.0
        if not error <= _TOLERANCE[dtype] and problem is None:
            problem = f"{name}: off by {error:.2g} of its norm, {_TOLERANCE[dtype]:g} allowed"
        worst = max(worst, error)
    return {"problem": problem, "worst_error": worst}


def gradients(module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Return the gradients of the named parameters by "gradient of ...", and clear all gradients of the module."""
    found = {}
    for name, parameter in module.named_parameters():
        if name in names:
            assert parameter.grad is not None, name
            found[f"gradient of {name}"] = parameter.grad
        parameter.grad = None
    return found


def _kind(name: str) -> str:
    return "gradient" if name.startswith("gradient") else name
