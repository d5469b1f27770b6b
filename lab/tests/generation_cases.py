"""Shared by the tests of generation, loading and prompts: a tiny model, its tokenizer and its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.commands.generate.command import GenerateConfig
from kvshift_lab.data.tokenizers import train_bpe

TEXT = ["to be or not to be, that is the question: whether 'tis nobler in the mind", "naïve café — 東京 🙂"]
PROMPTS = ["to be", "or not to be, that is the question: whether", "t", "café — 東京 🙂 the mind"]
SHAPE: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 58,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 64,
}


def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe(iter(TEXT), 277)


def save_model(folder: Path, cls: type = KVShiftLlamaForCausalLM, **options: Any) -> Path:
    """Save a model whose weights are so large that every text continues differently, and return its folder."""
    torch.manual_seed(0)
    config_class = KVShiftLlamaConfig if cls is KVShiftLlamaForCausalLM else LlamaConfig
    model = cls(config_class(**{**SHAPE, "vocab_size": 277, "bos_token_id": 0, "eos_token_id": 0, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and ".shift." not in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_prompts(folder: Path, prompts: list[str] = PROMPTS) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "id": 7}) + "\n" for prompt in prompts), encoding="utf-8")
    return path


def batch_config(model_folder: Path, tmp_path: Path, **options: Any) -> GenerateConfig:
    defaults = {"max_new_tokens": 11, "temperature": 0.0, "batch_size": 3}
    prompts = options.pop("prompts", None) or write_prompts(tmp_path)
    output = tmp_path / "answers.jsonl"
    return GenerateConfig(model=str(model_folder), prompts=prompts, output=output, **{**defaults, **options})
