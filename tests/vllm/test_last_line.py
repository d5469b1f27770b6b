"""A server that does not start says why in its last line, whichever process of it found out."""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvshift.integrations.vllm_plugin.start_fault import MESSAGES

from .server import serve

CASES = {
    "the plugin": (["--quantization=fp8"], "vLLM cannot serve this model with KV shift so: quantization must be "),
    "the engine": (["--block-size=16"], "block_size must give every layer blocks that CPU_ATTN takes whole, of "),
    "an option": (["--no-such-option"], "unrecognized arguments: --no-such-option (kvshift serve CHECKPOINT --help"),
    "a value": (["--max-num-seqs=few"], "argument --max-num-seqs: "),
    "vLLM": (["--max-model-len=100000"], "User-specified max_model_len (100000) is greater than the derived "),
}


@pytest.mark.parametrize("case", CASES)
def test_the_last_line_is_the_reason(case: str, checkpoint: Callable[[str], Path]) -> None:
    options, reason = CASES[case]
    folder = checkpoint("llama")
    words = Tokenizer(WordLevel({"to": 0, "be": 1}, unk_token="to"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    ended = subprocess.run(serve(folder, 1, *options), capture_output=True, text=True, timeout=420)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"kvshift serve: {reason}"), ended.stderr[-3000:]
    assert ended.returncode in (1, 2)


@pytest.mark.parametrize(
    ("message", "module"), zip(MESSAGES, ["v1.engine.core", "v1.executor.multiproc_executor"], strict=True)
)
def test_vllm_still_says_so(message: str, module: str) -> None:
    assert f'logger.exception("{message}")' in inspect.getsource(import_module(f"vllm.{module}"))
