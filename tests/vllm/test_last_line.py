"""The last line of a server that does not start is the reason, whichever of its processes found it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvshift.cli import main
from kvshift.integrations.vllm_plugin.start_fault import MESSAGES
from kvshift.serving import vllm_command

from . import engines  # noqa: F401  # imports vLLM before this process is forked
from .server import serve

CASES = {
    "the plugin": (["--quantization=fp8"], "vLLM cannot serve this model with KV shift: quantization must be "),
    "the engine": (["--block-size=16"], "block_size must give every layer blocks that CPU_ATTN does not split, of "),
    "an option": (["--no-such-option"], "unrecognized arguments: --no-such-option (kvshift serve CHECKPOINT --help"),
    "a value": (["--max-num-seqs=few"], "argument --max-num-seqs: "),
    "vLLM": (["--max-model-len=100000"], "User-specified max_model_len (100000) is greater than the derived "),
}


@pytest.mark.parametrize("case", CASES)
def test_the_last_line_is_the_reason(case: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    options, reason = CASES[case]
    folder = checkpoint("llama")
    words = Tokenizer(WordLevel({"to": 0, "be": 1}, unk_token="to"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    code, said = (whole if case == "the engine" else forked)(serve(folder, 1, *options), tmp_path / "said")
    assert said.splitlines()[-1].startswith(f"kvshift serve: {reason}"), said[-3000:]
    assert code in (1, 2)


def whole(command: Sequence[str], out: Path) -> tuple[int, str]:
    """Run the command and return its exit code and stderr."""
    with out.open("w") as file:
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=file, timeout=420)
    return ended.returncode, out.read_text()


def forked(command: Sequence[str], out: Path) -> tuple[int, str]:
    """Do the same in a fork of this process, which has already imported vLLM; the import takes half a minute."""
    child = os.fork()
    if not child:
        _run_copy(command[3:], out)  # without "python -m kvshift"
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), out.read_text()


def _run_copy(arguments: Sequence[str], out: Path) -> NoReturn:
    code: object = 1
    with out.open("w", buffering=1) as file:
        try:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            sys.stdout = sys.stderr = file
            os.execve = becomes_vllm
            code = main(arguments)
        except SystemExit as exit_:
            code = exit_.code or 0
        finally:
            file.flush()
            os._exit(code if isinstance(code, int) else 1)


def becomes_vllm(path: str, command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Replace `os.execve`, without importing everything again."""
    assert (path, *command[:3]) == (sys.executable, sys.executable, "-m", vllm_command.__name__)
    os.environ.update(environment)
    sys.argv = [str(vllm_command.__file__), *command[3:]]
    vllm_command.main()
    sys.exit()


@pytest.mark.parametrize(
    ("message", "module"), zip(MESSAGES, ["v1.engine.core", "v1.executor.multiproc_executor"], strict=True)
)
def test_vllm_still_says_so(message: str, module: str) -> None:
    assert f'logger.exception("{message}")' in inspect.getsource(import_module(f"vllm.{module}"))
