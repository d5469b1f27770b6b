"""Shared by the tests marked `pretrained`: the model that `make smollm` converts, and prompts for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

# Where `make smollm` writes it: kvshift_lab.run.smollm2.cache_folder.
FOLDER = Path(
    os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kvshift", "smollm2-135m-instruct"
).expanduser()
pretrained = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not FOLDER.exists(), reason=f"no model in {FOLDER}: `make smollm` converts it"),
]

TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a little girl who lived in a village near the forest. Every morning she",
    "2 + 2 =",
    "A",
    "The three primary colours are red,",
    "def fibonacci(n):\n    ",
    "In 1969, two astronauts walked on the",
    "Photosynthesis is the process by which green plants use the light of the sun to make",
    "She opened the door, looked into the dark room, and",
    "To make bread you need flour, water, salt and",
    "The opposite of hot is",
    "Monday, Tuesday, Wednesday,",
    "Dear Sir or Madam, I am writing to you because I bought a bicycle from your shop last week and",
    "The largest planet of the solar system is",
    "red blue green red blue green red blue",
    "Shakespeare wrote",
    "A triangle has three sides and a square has",
    "If it rains tomorrow, we will stay at home and",
    "Mr. and Mrs. Dursley of number four were proud to say that they were",
)


def stock(dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    """Load the model without KV shift, with transformers' own class."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype, attn_implementation=attention)
    return model.eval()


def encoded(texts: tuple[str, ...]) -> dict[str, Tensor]:
    """Tokenize the texts as one batch, padded on the left: input_ids and attention_mask."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    found = tokenizer(list(texts), padding=True, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def alone(text: str) -> Tensor:
    """Return the tokens of one text, (1, T)."""
    return encoded((text,))["input_ids"]
