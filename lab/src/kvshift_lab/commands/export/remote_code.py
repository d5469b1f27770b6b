"""Model folders for the hub, whose code file imports the classes of the installed package kvshift."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvshift.models.extending import auto_class
from kvshift.models.retrofit import FAMILIES
from kvshift_lab.commands.export.comparison import largest_difference
from kvshift_lab.core.errors import LabError, RunFailedError

FILE = "modeling_kvshift.py"
_CHILD = """
import sys
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from kvshift_lab.commands.export.comparison import compute
logging.disable_progress_bar()
folder, given, found = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
prompts = [tensor for _, tensor in sorted(load_file(given).items(), key=lambda item: int(item[0]))]
save_file({name: tensor.contiguous() for name, tensor in compute(model, prompts).items()}, found)
"""


def require_known(model: Any) -> None:
    """Raise a LabError unless the model belongs to a supported family; variants of the lab do not."""
    kind = type(model)
    if kind not in _causal_models():
        known = ", ".join(made.__name__ for made in _causal_models())
        raise LabError(f"model: a {kind.__name__} cannot be exported; these can: {known}")


def write_code(model: Any, folder: Path) -> Path:
    """Write the code file beside the weights that `save_pretrained` wrote, and name its classes in config.json.

    The file has a subclass of each of the family's classes, because transformers marks the classes that it loads from
    a folder. Without the package, transformers names it as missing before the file runs.
    """
    family = _causal_models()[type(model)]
    classes = [family.config, *family.models.values()]
    imports = [f"from {made.__module__} import {made.__name__} as _{made.__name__}" for made in classes]
    definitions = [f"class {family.config.__name__}(_{family.config.__name__}):\n    pass"]
    definitions += [
        f"class {made.__name__}(_{made.__name__}):\n    config_class = {family.config.__name__}"
        for made in family.models.values()
    ]
    head = '"""Loads the classes of the package kvshift, which this model needs: pip install kvshift."""'
    path = folder / FILE
    path.write_text("\n\n\n".join(["\n".join([head, "", *imports]), *definitions]) + "\n", encoding="utf-8")
    saved = folder / "config.json"
    config = json.loads(saved.read_text(encoding="utf-8"))
    names = {"AutoConfig": family.config, **{auto_class(made).__name__: made for made in family.models.values()}}
    config["auto_map"] = {auto: f"{path.stem}.{made.__name__}" for auto, made in names.items()}
    saved.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path


def check_folder(folder: Path, prompts: list[Tensor], expected: dict[str, Tensor]) -> float:
    """Load the folder with its code in another process, and compare its results with those of the model.

    Args:
        folder: Folder of the model and its code.
        prompts: Prompts (T,) of any lengths.
        expected: Results of `compute` for these prompts.

    Returns:
        The largest difference of logits. The tokens are equal.

    Raises:
        RunFailedError: The folder does not load there, or its results differ.
    """
    with tempfile.TemporaryDirectory() as place:
        given, found = (Path(place) / name for name in ("given", "found"))
        save_file({str(i): prompt for i, prompt in enumerate(prompts)}, given)
        environment = {**os.environ, "HF_MODULES_CACHE": str(Path(place) / "modules"), "HF_HUB_OFFLINE": "1"}
        arguments = [sys.executable, "-W", "ignore", "-c", _CHILD, str(folder), str(given), str(found)]
        ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
            raise RunFailedError(f"the exported folder does not load: {last}")
        results = load_file(found)
    if set(results) != set(expected):
        raise RunFailedError(
            f"in the exported folder, {sorted(set(expected) ^ set(results))} are missing or unexpected"
        )
    return largest_difference(expected, results, "from the folder")


@cache
def _causal_models() -> dict[type, Any]:
    """Return the families by the class of their causal language model, Llama first."""
    families = sorted(FAMILIES, key=lambda family: family.config.model_type != "kvshift_llama")
    return {
        made: family
        for family in families
        for made in family.models.values()
        if auto_class(made) is AutoModelForCausalLM
    }
