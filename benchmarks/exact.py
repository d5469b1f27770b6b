"""Is a layer or a model right? It is compared with the same weights in float64, whose shift is the reference.

It runs at the shape that is timed, and a slice of the first rows and positions is compared. That is enough because
layers are causal and gradients are those of a loss over the slice alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvshift import KVShift

SLICE = (slice(0, 2), slice(0, 32))  # rows, positions

# Of the norm of a tensor, as matrix products amplify rounding errors. A shift that is wrong at one position of 32 is
# off by 0.2.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def use_backend(backend: str, module: Any) -> Any:
    """Make every shift of a module use one backend, in place."""
    for part in module.modules():
        if isinstance(part, KVShift):
            part.forward = functools.partial(part.forward, backend=backend)
    return module


def to_reference(module: Any) -> Any:
    """Convert a module to float64 and its shifts to the reference, in place."""
    return use_backend("reference", module.double())


def compare(found: Mapping[str, Tensor], exact: Mapping[str, Tensor], dtype: torch.dtype) -> float:
    """Return the largest error of a tensor relative to its norm.

    The error of a tensor that is nearly zero compared with the others, such as the gradient of an unimportant bias, is
    relative to a hundredth of the largest norm of its kind; all gradients are one kind.

    Raises:
        ArithmeticError: an error is too large for the dtype; the first such tensor is named.
    """
    largest: dict[bool, float] = {}
    for name, value in exact.items():
        gradient = name.startswith("gradient")
        largest[gradient] = max(largest.get(gradient, 0.0), float(value.norm()))
    errors = {}
    for name, value in exact.items():
        norm = max(float(value.norm()), largest[name.startswith("gradient")] / 100) or 1.0
        errors[name] = float((found[name].double() - value).norm()) / norm
        if not errors[name] <= _TOLERANCE[dtype]:
            raise ArithmeticError(f"{name}: off by {errors[name]:.2g} of its norm, {_TOLERANCE[dtype]:g} allowed")
    return max(errors.values())
