"""Data options of a run: text, tokenizer and sequences."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvshift_lab.core.errors import LabError, require
from kvshift_lab.core.options import ADDED_LATER

SHARED_DATA_ENV = "KVSHIFT_SHARED_DATA"
"""Environment variable that names the folder of larger corpora, which are not part of the repository."""

# A byte-level BPE starts from the 256 bytes and adds the end-of-text token.
SMALLEST_VOCABULARY = 257

SHORTEST_PERIODIC = 64
"""Minimum length, in tokens, of sequences that repeat a span, which has up to 63."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, the tokenizer that encodes it, and the layout of the sequences."""

    corpus: str = "tinyshakespeare"
    """The text: a bundled corpus by name (tinyshakespeare); a file, a folder or a quoted glob of .txt, .md, .jsonl and
    .json files, each also as .gz, .xz or .zst, and .parquet files; or a hub dataset "owner/name", such as
    HuggingFaceFW/fineweb-edu."""

    hub_config: str | None = None
    """Configuration of the hub dataset, such as sample-10BT."""

    split: str = "train"
    """Split of the hub dataset to train on."""

    streaming: bool = False
    """Read the text during training, instead of downloading, tokenizing and caching all of it first."""

    text_column: str = "text"
    """Column that holds the text, in .jsonl, .json and .parquet files and hub datasets. A row is one document."""

    validation: str | None = None
    """Validation text: a file, folder or glob, or, with a hub dataset, one of its splits. None: the last
    `validation_fraction` of the corpus; when streaming, its first 1000 documents."""

    validation_fraction: float = 0.1
    """Size of the held-out text if `validation` is None: a fraction of the corpus between 0 and 1, counted in
    documents, or in characters if that is less than one document."""

    tokenizer: str | None = None
    """Tokenizer: a folder or a name on the hub. None: train a byte-level BPE on the training text."""

    vocab_size: int = 1024
    """Vocabulary size of the BPE to train, including the 256 bytes and <|endoftext|>."""

    sequence_length: int = 256
    """Tokens per sequence."""

    packing: Literal["concat", "documents"] = "concat"
    """How documents share a sequence. concat: attention and shift cross from one document to the next, as in the paper.
    documents: no document sees another."""

    periodic: Literal["text", "random", "both"] | None = field(default=None, metadata=ADDED_LATER)
    """Train on sequences that repeat a span of 16 to 63 tokens to their end, from which a model learns to copy: the
    first tokens of each sequence of text, random tokens of the whole vocabulary, or both, each in half of the
    sequences. Only with packing concat. The validation text is not changed."""


def find_shared(name: str | None) -> str | None:
    """Return the path of a text in the folder of larger corpora.

    None and names without a slash, which are bundled corpora, are returned unchanged.

    Raises:
        LabError: the environment variable `SHARED_DATA_ENV` is not set, or its folder has no such file.
    """
    if name is None or "/" not in name:
        return name
    folder = os.environ.get(SHARED_DATA_ENV)
    if not folder or not list(Path(folder).glob(name)):
        was = f"{folder!r}, which does not" if folder else "not set"
        raise LabError(
            f"the environment variable {SHARED_DATA_ENV} must name the folder that contains {name}; it is {was} "
            "(`python -m kvshift_lab.data.wikipedia --help` says how to build it)"
        )
    return str(Path(folder) / name)


def check_data_config(config: DataConfig) -> None:
    """Raise a `LabError` for values that are invalid for every text."""
    for item in dataclasses.fields(config):
        if getattr(config, item.name) == "":
            raise LabError(f"{item.name} must not be empty")
    length, held_out = config.sequence_length, config.validation_fraction
    require(length >= 2, "sequence_length", length, "2 or more (a token and its successor)")
    require(0 < held_out < 1, "validation_fraction", held_out, "between 0 and 1, both excluded")
    require(config.packing in ("concat", "documents"), "packing", config.packing, "concat or documents")
    kinds = (None, "text", "random", "both")
    require(config.periodic in kinds, "periodic", config.periodic, "text, random, both or left out")
    if config.periodic is not None:
        if config.packing != "concat":
            raise LabError(f"periodic must be left out with packing {config.packing}: a span would cross documents")
        require(length >= SHORTEST_PERIODIC, "sequence_length", length, f"{SHORTEST_PERIODIC} or more with periodic")
    if config.tokenizer is None:
        least = f"{SMALLEST_VOCABULARY} or more (256 bytes and <|endoftext|>)"
        require(config.vocab_size >= SMALLEST_VOCABULARY, "vocab_size", config.vocab_size, least)
