"""Loading by `accelerate.load_checkpoint_and_dispatch`, which matches weights and parameters only by name.

With a device map, accelerate skips weights that have no parameter of the same name, and offers no hook to convert them.
Before it loads the others, it calls `model.state_dict()`, and there this module loads the convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from kvshift.models.baichuan_m1.layout import CONVOLUTIONS, to_coefficients


def load_convolutions(model: nn.Module, caller: FrameType) -> None:
    """If accelerate's loading is the caller, load the coefficients, in float32, from the files that it is loading.

    Raises:
        ValueError: a weight is in the files under two names or in a wrong shape, or modules would be offloaded to disk.
    """
    if (caller.f_globals.get("__name__"), caller.f_code.co_name) != (
        "accelerate.utils.modeling",
        "load_checkpoint_in_model",
    ):
        return
    device_map, files = caller.f_locals["device_map"], caller.f_locals["checkpoint_files"]
    if device_map is None:
        return  # accelerate calls `load_state_dict`, which accepts the released names
    if "disk" in device_map.values():
        raise ValueError(
            'device_map of load_checkpoint_and_dispatch must not have "disk" for a Baichuan-M1: accelerate would not '
            "find conv_k and conv_v there. Use from_pretrained(folder, device_map=..., offload_folder=...)"
        )
    modules, found = dict(model.named_modules()), dict[str, str]()
    for name, tensor in _convolutions(files):
        path, _, last = name.rpartition(".")
        ours, parameter = CONVOLUTIONS[last].split(".")
        shift: Any = modules.get(f"{path}.{ours}")
        if shift is None:
            continue  # belongs to a layer that this model does not have; accelerate skips those too
        coefficients = to_coefficients(tensor).float()
        first = found.setdefault(f"{path}.{parameter}", name)
        if first != name:
            raise ValueError(f"the checkpoint has both {first} and {name}, two names of one weight")
        if coefficients.shape != getattr(shift, parameter).shape:
            heads = len(getattr(shift, parameter))
            raise ValueError(f"{name} must have the shape (1, 1, {heads}, 1, 2); got {tuple(tensor.shape)}")
        setattr(shift, parameter, nn.Parameter(coefficients, getattr(shift, parameter).requires_grad))


def _convolutions(files: list[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        if Path(file).suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                for name in filter(_is_convolution, opened.keys()):
                    yield name, opened.get_tensor(name)
        else:
            weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            yield from ((name, tensor) for name, tensor in weights.items() if _is_convolution(name))


def _is_convolution(name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last in CONVOLUTIONS and path.endswith("self_attn")
