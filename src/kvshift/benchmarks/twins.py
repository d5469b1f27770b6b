"""The same module in float64 with the reference as its shift, and how far a path may lie from it.

A path is run at the very shapes that are timed, and judged on a slice of the first rows and positions: layers are
causal, and gradients are those of a loss that looks at the slice alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvshift.layers import KVShift

SLICE = (slice(0, 2), slice(0, 32))  # rows, positions

# Of the norm of a tensor: matrices multiply and add up what each rounding leaves, layer upon layer. A shift that is
# wrong at one position of 32 is off by 0.2 of it.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def exactly(module: Any) -> Any:
    """Convert a module to float64, and every shift in it into the reference; in place."""
    return shifting_by("reference", module.double())


def shifting_by(backend: str, module: Any) -> Any:
    """Have every shift of a module done by one backend, and none once more in backward; in place."""
    for part in module.modules():
        if isinstance(part, KVShift):
            part.forward = functools.partial(part.forward, backend=backend)  # such a forward is not recomputed
    return module


def far_off(found: Mapping[str, Tensor], exact: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """ "problem": the first tensor that is off, with its distance as a part of its norm; "worst_error": the largest.

    A tensor that is nearly zero beside the others, such as the gradient of a bias that hardly matters, is measured
    against a hundredth of the largest norm of its kind ("gradient of ..." are one kind).
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
    """Those that `backward` left, by "gradient of ..."; the module has none afterwards."""
    found = {}
    for name, parameter in module.named_parameters():
        if name in names:
            assert parameter.grad is not None, name
            found[f"gradient of {name}"] = parameter.grad
        parameter.grad = None
    return found


def _kind(name: str) -> str:
    return "gradient" if name.startswith("gradient") else name
