"""Shared by the tests of generation, loading and prompts: a tiny model, its tokenizer and its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
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
