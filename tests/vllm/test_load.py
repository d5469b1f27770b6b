"""Requests over HTTP from 32 clients, a third of which leave: adapters, 8-bit weights and two engines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvshift.models.retrofit import load_kv_shift

from .load import CONTEXT, Prompt, prompts_for, withstand
from .server import Server, free_port, serve
from .test_lora import ALL, adapted
from .test_quantized import quantize

Checkpoint = Callable[[str], Path]
REQUESTS = 300
SMALL = (f"--max-model-len={CONTEXT}", "--max-num-seqs=16", "--max-num-batched-tokens=256", "--block-size=32")

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """The folder of a retrofitted model with a tokenizer, which a server needs."""
    shutil.copytree(checkpoint("llama-retrofit"), tmp_path / "model")
    words = Tokenizer(WordLevel({"to": 0, "be": 1}, unk_token="to"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_two_adapters_and_none(folder: Path, tmp_path: Path) -> None:
    models = {
        str(folder): load_kv_shift(folder).eval(),
        "keys": adapted(load_kv_shift(folder), tmp_path / "keys", ("k_proj", "v_proj"), 1),
        "all": adapted(load_kv_shift(folder), tmp_path / "all", ALL, 2),
    }
    of_each = {name: prompts_for(model, REQUESTS // len(models), margin=1e-3) for name, model in models.items()}
    asked = [(name, prompts[i]) for i in range(REQUESTS // len(models)) for name, prompts in of_each.items()]
    slots = "--max-loras=3"  # one stays empty, see test_lora.py
    modules = [f"{name}={tmp_path / name}" for name in ("keys", "all")]
    options = ("--enable-lora", slots, "--max-lora-rank=8", "--lora-modules", *modules)
    assert wrong_answers(folder, tmp_path, asked, *options) == {}


@torch.no_grad()
def test_weights_of_8_bits(folder: Path, tmp_path: Path) -> None:
    """The last bit of an input sometimes decides to which 8-bit number it is rounded, see test_quantized.py.

    So the prompts are those whose answers usually do not depend on it. One answer in a hundred may still differ, by a
    token that the model finds nearly as likely.
    """
    model = quantize(folder, tmp_path / "quantized", "int")
    prompts = prompts_for(model, REQUESTS, margin=0.1, each=96, tokens=8)
    asked = [(str(tmp_path / "quantized"), prompt) for prompt in prompts]
    wrong = wrong_answers(tmp_path / "quantized", tmp_path, asked)
    assert len(wrong) <= REQUESTS // 100
    for number, got in wrong.items():
        prompt, answer = prompts[number]
        first = next(i for i, (ours, theirs) in enumerate(zip(got, answer, strict=False)) if ours != theirs)
        logits = model(torch.tensor([[*prompt, *answer[:first]]]), use_cache=False).logits[0, -1]
        assert logits.max() - logits[got[first]] < 0.5


def test_two_engines(folder: Path, tmp_path: Path) -> None:
    """With data parallelism, each engine has the whole model and its own cache, and serves some of the requests."""
    prompts = prompts_for(load_kv_shift(folder).eval(), REQUESTS // 3, margin=1e-3)
    asked = [(str(folder), prompt) for prompt in prompts]
    port, two = free_port(), ("--data-parallel-size=2", "--api-server-count=1")
    with Server(serve(folder, port, *SMALL, *two), tmp_path / "server.log", port) as server:
        assert withstand(server, asked) == {}
        said = server.session.get(f"{server.url}/metrics", timeout=60).text
    answered = re.findall(r'^vllm:generation_tokens_total\{engine="(\d)".* (\S+)$', said, re.MULTILINE)
    assert [engine for engine, tokens in answered if float(tokens) > 0] == ["0", "1"]


def wrong_answers(folder: Path, logs: Path, asked: list[tuple[str, Prompt]], *options: str) -> dict[int, list[int]]:
    port = free_port()
    with Server(serve(folder, port, *SMALL, *options), logs / "server.log", port) as server:
        return withstand(server, asked)
