"""Load what `lab/tests/installed.py` exported, each model with its code, and compare its outputs with those recorded.

    PYTHON -P lab/tests/load_exported.py FOLDER

Each model has a process of its own, in which nothing imports the classes of kvshift before the model's code does: a
fork, because importing transformers takes longer than everything else.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvshift_lab.commands.export.comparison import compute, largest_difference


def load(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    expected, prompts = (load_file(folder / name) for name in ("expected", "prompts"))
    found = compute(model, [prompts[number] for number in sorted(prompts)])
    assert set(found) == set(expected), folder.name
    off = largest_difference(expected, found, "from the folder")
    print(
        f"installed: {folder.name}, loaded with transformers {transformers.__version__}: off by {off:.1e}", flush=True
    )


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    for each in sorted(Path(sys.argv[1]).iterdir()):
        process = multiprocessing.get_context("fork").Process(target=load, args=(each,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{each.name}: not loaded")
