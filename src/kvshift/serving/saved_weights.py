"""Checks of saved weights before vLLM loads them: files are complete, and coefficients fit the model.

A safetensors file consists of the length of its header (8 bytes), the header (a JSON object with the dtype, shape and
offsets of each tensor) and the tensors. Only headers and coefficients are read, without torch.

Shapes: G KV heads, W window.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvshift.lab.core.errors import LabError
from kvshift.lab.runs.model_files import read_object

_INDEX = "model.safetensors.index.json"
_FLOATS = {"F64": "d", "F32": "f", "F16": "e"}  # format characters of `struct`; BF16 is the upper half of F32
_NAMES = {"k": ("shift.alpha",), "v": ("shift.beta",)}
_NAMES_OF_BAICHUAN_M1 = {"k": ("conv_k", "K"), "v": ("conv_v", "V")}  # the released name and an earlier one


class SavedTensor(NamedTuple):
    """The location of a tensor in a file, from byte `begin` up to byte `end`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_weights(folder: Path, config: dict[str, Any]) -> None:
    """Raise a LabError unless all files of weights are complete and every layer has its coefficients.

    Args:
        folder: the model folder.
        config: the contents of its config.json.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LabError(f"model: {folder} has no weights: no file *.safetensors")
    if (folder / _INDEX).is_file():
        named = set(map(str, read_object(folder / _INDEX).get("weight_map", {}).values()))
        if absent := sorted(named - {file.name for file in files}):
            raise LabError(f"model: {folder} lacks {absent[0]}, which {_INDEX} names")
    tensors = {name: tensor for file in files for name, tensor in _read_header(file).items()}
    for names, shape in _coefficients(config):
        found = next((name for name in names if name in tensors), None)
        if found is None:
            raise LabError(f"model: {folder} lacks the coefficients {names[0]}")
        tensor = tensors[found]
        if tensor.shape != shape:
            raise LabError(
                f"model: {tensor.file}: {found} has the shape {[*tensor.shape]}, expected {[*shape]} by its config.json"
            )
        if not all(map(math.isfinite, _numbers(tensor, found))):
            raise LabError(f"model: {tensor.file}: {found} has numbers that are not finite, as after a diverged run")


def _coefficients(config: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Yield the possible names of each coefficient tensor and its shape; nothing for a model without shift."""
    kind, heads = str(config["model_type"]), config.get("num_key_value_heads") or config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        if kind == "baichuan_m1":
            swa_heads = config.get("num_swa_key_value_heads") or heads
            own = swa_heads if layer in (config.get("sliding_window_layers") or ()) else heads
            named, shape = _NAMES_OF_BAICHUAN_M1, (1, 1, own, 1, 2)
        elif kind.startswith("kvshift_"):
            gate = config.get("shift_constraint") == "gate"
            named, shape = _NAMES, (heads, 1 if gate else config.get("shift_window", 2))
        else:
            return
        for target in config.get("shift_targets", named):
            if target in named:  # the plugin refuses shifted queries
                yield tuple(f"model.layers.{layer}.self_attn.{name}" for name in named[target]), shape


def _read_header(file: Path) -> dict[str, SavedTensor]:
    """Return the tensors of a file by name.

    Raises:
        LabError: if the file is not a complete safetensors file.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, size)))
        tensors = {
            name: SavedTensor(file, tensor["dtype"], tuple(tensor["shape"]), *tensor["data_offsets"])
            for name, tensor in header.items()
            if name != "__metadata__"
        }
        start = 8 + length
        expected = start + max((tensor.end for tensor in tensors.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise LabError(f"model: {file} is not a complete safetensors file: its header cannot be read") from error
    if size != expected:
        raise LabError(f"model: {file} is damaged: it has {size:,} bytes, but {expected:,} according to its header")
    return {
        name: tensor._replace(begin=start + tensor.begin, end=start + tensor.end) for name, tensor in tensors.items()
    }


def _numbers(tensor: SavedTensor, name: str) -> tuple[float, ...]:
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        data = file.read(tensor.end - tensor.begin)
    letter = _FLOATS.get(tensor.dtype)
    if tensor.dtype == "BF16":
        data, letter = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)), "f"
    if letter is None:
        raise LabError(f"model: {tensor.file}: {name} must be of a floating-point dtype, got {tensor.dtype}")
    return struct.unpack(f"<{len(data) // struct.calcsize(letter)}{letter}", data)
