"""End-to-end checks of an environment after `pip install . ./lab`, with the newest packages of the index.

    PYTHON -P lab/tests/installed.py OTHER_PYTHON

PYTHON is the interpreter of that environment, which has no pytest. OTHER_PYTHON is the interpreter of an environment
with transformers at the other end of the supported range. `make test-newest` creates both. The first failure ends the
script with a traceback:

- `kvshift check` passes for KVShiftLlama, Baichuan-M1 and every retrofitted family, three of them through the command;
- all of them generate the same tokens with a cache as without;
- every code block of docs/tutorial.md runs after the installation that the page describes;
- a model written by `kvshift export --remote-code` computes the same in the other environment, and a model written
  there computes the same here.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

import kvshift
from kvshift_lab.check import check_model
from kvshift_lab.check.stock_models import GROUPS, build_stock
from kvshift_lab.commands.export.comparison import compute
from kvshift_lab.commands.export.remote_code import write_code

ROOT = Path(__file__).parents[2]
OURS = GROUPS["With KV shift"]
AS_A_COMMAND = ("kvshift_llama", "gemma3_text with shift", "gpt2 with shift")


def main(other: str) -> None:
    """Run all checks, then run the export in the other environment, too."""
    assert not Path(kvshift.__file__).is_relative_to(ROOT / "src"), "kvshift is imported from the clone, not installed"
    log(f"transformers {transformers.__version__}, torch {torch.__version__}, kvshift {kvshift.__version__}")
    for name in OURS:
        check(name)
        generate(name)
    for name in AS_A_COMMAND:
        check_as_a_command(name)
    run_the_tutorial()
    export(other)
    subprocess.run([other, "-P", __file__, "export", sys.executable], check=True)


def run(*command: str | Path, where: Path | str = ROOT) -> None:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"


def log(line: str) -> None:
    print(f"installed: {line}", flush=True)


def check(name: str) -> None:
    report = check_model(build_stock(name))
    assert report.verdicts, name
    assert not report.wrong, f"{name}: {report.wrong}"
    log(f"{name}: {len(report.verdicts)} properties, none wrong")


def generate(name: str) -> None:
    model, prompt = build_stock(name), torch.arange(5, 16).unsqueeze(0)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 1}
    cached, uncached = (model.generate(prompt, use_cache=use_cache, **options) for use_cache in (True, False))
    assert cached.shape == (1, 31)
    assert torch.equal(cached, uncached), f"{name}: {cached.tolist()} with a cache, {uncached.tolist()} without"


def check_as_a_command(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        build_stock(name).save_pretrained(folder)
        run(Path(sys.executable).with_name("kvshift"), "check", folder)
    log(f"kvshift check of a {name}: right")


def run_the_tutorial() -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    (pip install .*)$", text, re.MULTILINE)
    run(sys.executable, "-m", *shlex.split(line))
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "tutorial.py"
        code.write_text("\n".join(blocks), encoding="utf-8")
        run(sys.executable, code, where=folder)
    log(f"tutorial: {len(blocks)} blocks ran after `{line}`")


def export(other: str) -> None:
    """Export every family, and compare its outputs in the environment of the interpreter `other`."""
    with tempfile.TemporaryDirectory() as place:
        prompts = [torch.arange(5, 5 + length) for length in (3, 11, 1, 8)]
        for name in OURS:
            if name == "baichuan_m1":  # has no export
                continue
            model, folder = build_stock(name), Path(place) / "models" / re.sub(r"\W+", "_", name)
            model.save_pretrained(folder)
            write_code(model, folder)
            expected = {what: tensor.contiguous() for what, tensor in compute(model, prompts).items()}
            save_file(expected, folder / "expected")
            save_file({str(number): prompt for number, prompt in enumerate(prompts)}, folder / "prompts")
        log(f"exported with transformers {transformers.__version__}")
        environment = {**os.environ, "HF_MODULES_CACHE": str(Path(place) / "modules")}
        script = Path(__file__).with_name("load_exported.py")
        subprocess.run([other, "-P", "-W", "ignore", script, f"{place}/models"], env=environment, check=True)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.utils.logging.disable_progress_bar()
    *export_alone, interpreter = sys.argv[1:]
    (export if export_alone else main)(interpreter)
