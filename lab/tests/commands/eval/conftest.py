from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from kvshift_lab.data.tokenizers import train_bpe

from ...generation_cases import TEXT, save_model, tokenizer
from .benchmark_cases import write_benchmarks


@pytest.fixture(scope="package")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("models") / "llama", LlamaForCausalLM)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of another kind, with another tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    torch.manual_seed(1)
    sizes = {"n_positions": 96, "n_embd": 24, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=268, bos_token_id=0, eos_token_id=0, **sizes)).save_pretrained(folder)
    train_bpe(iter(TEXT), 268).save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all benchmarks, with a few questions each."""
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks"))
