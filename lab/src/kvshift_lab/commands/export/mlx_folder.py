"""Model folders for mlx-lm: weights and configuration in the format of transformers, and a copy of `mlx_model.py`."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.commands.export.comparison import largest_difference
from kvshift_lab.core.errors import LabError, RunFailedError, require_importable

MODEL_FILE = "kvshift_llama.py"


def require_mlx() -> None:
    """Raise a LabError with install instructions if mlx or mlx-lm is missing."""
    require_importable("format mlx", ("mlx", "mlx_lm"), "pip install mlx-lm 'mlx[cpu]'")


def require_mlx_model(model: Any) -> None:
    """Raise a LabError unless `mlx_model.py` supports the model."""
    if type(model) is not KVShiftLlamaForCausalLM:
        raise LabError(f"model: format mlx supports only Llamas with KV shift, got a {type(model).__name__}")
    config: Any = model.config
    rope = config.rope_parameters.get("rope_type", "default")
    unknown = {
        "shift_targets": None if set(config.shift_targets) in ({"k"}, {"v"}, {"k", "v"}) else [*config.shift_targets],
        "shift_constraint": None if config.shift_constraint == "free" else config.shift_constraint,
        "qk_norm": config.qk_norm or None,
        "sliding_window": config.sliding_window,
        "rope_parameters": None if rope in ("default", "linear", "llama3") else rope,
    }
    for name, value in unknown.items():
        if value is not None:
            raise LabError(f"model: format mlx does not support {name} {value}")


def write_mlx(model: Any, folder: Path) -> None:
    """Save the model with its mlx-lm code, which `model_file` in config.json names."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "model_file": MODEL_FILE}, indent=2) + "\n", encoding="utf-8")
    code = (files("kvshift_lab.commands.export") / "mlx_model.py").read_text(encoding="utf-8")
    (folder / MODEL_FILE).write_text(code, encoding="utf-8")


def check_mlx(folder: Path, prompts: list[Tensor], expected: dict[str, Tensor]) -> float:
    """Compare logits and greedy tokens of mlx-lm for each single prompt with the results of `comparison.compute`.

    Returns:
        The largest difference of logits. The tokens are equal.

    Raises:
        RunFailedError: mlx-lm cannot load the folder, or its results differ.
    """
    import mlx.core as mx
    from mlx_lm.utils import load_model

    def compute(ids: list[int], cache: Any) -> Tensor:
        logits = model(mx.array([ids]), cache=cache).astype(mx.float32)
        return torch.tensor(logits.tolist())

    found = {}
    try:
        model, _ = load_model(folder, trust_remote_code=True)
        for i, prompt in enumerate(prompts):
            ids = prompt.tolist()
            found[f"{i} logits"] = compute(ids, None)
            cache, given = model.make_cache(), ids
            while len(ids) < expected[f"{i} tokens"].shape[1]:
                given = [int(compute(given, cache)[0, -1].argmax())]
                ids = ids + given
            found[f"{i} tokens"] = torch.tensor([ids])
    except Exception as error:  # MLX's exceptions have no common base class
        raise RunFailedError(f"mlx-lm cannot run the exported model: {str(error).strip().splitlines()[0]}") from error
    return largest_difference(expected, found, "in mlx-lm")
