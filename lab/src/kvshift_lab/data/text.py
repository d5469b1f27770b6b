"""Load text for training: packed training and validation sequences, and the tokenizer that made them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import datasets
from transformers import PreTrainedTokenizerFast

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.config import DataConfig, check_data_config
from kvshift_lab.data.packing import count_tokens, pack_documents, pack_stream
from kvshift_lab.data.sources import STREAM_VALIDATION_DOCUMENTS, Documents, load_documents, texts
from kvshift_lab.data.tokenizers import make_tokenizer


@dataclass(frozen=True)
class TextData:
    """Training and validation sequences, and the tokenizer that made them.

    Sequences have the column input_ids and, with packing "documents", position_ids.
    """

    train: datasets.Dataset | datasets.IterableDataset
    validation: datasets.Dataset
    tokenizer: PreTrainedTokenizerFast


def load_text_data(config: DataConfig, *, seed: int, tokenizer_folder: Path) -> TextData:
    """Read, tokenize and pack the text of `config`.

    Args:
        config: data options.
        seed: random seed for the order of streamed sequences; other sequences keep the order of the text.
        tokenizer_folder: folder from which the tokenizer is loaded, or in which it is created and saved.

    Raises:
        LabError: an option or the text is invalid.
    """
    check_data_config(config)
    documents, held_out = load_documents(config)
    _refuse_empty(documents, "training", config)
    _refuse_empty(held_out, "validation", config)
    tokenizer = make_tokenizer(config, documents, tokenizer_folder)
    layout = (tokenizer, config.sequence_length, config.packing)

    validation = pack_documents(held_out, *layout)
    _refuse_short(validation, held_out, "validation", tokenizer, config)
    layout = (*layout, config.repeated_spans, config.periodic)
    if isinstance(documents, datasets.Dataset):
        train = pack_documents(documents, *layout)
        _refuse_short(train, documents, "training", tokenizer, config)
        return TextData(train, validation, tokenizer)
    _refuse_short(pack_stream(documents, *layout), documents, "training", tokenizer, config)
    return TextData(pack_stream(documents, *layout, seed=seed), validation, tokenizer)


def _refuse_empty(documents: Documents, part: str, config: DataConfig) -> None:
    if next(texts(documents), None) is not None:
        return
    reason = ""
    if config.streaming and config.validation is None:
        reason = (
            f" after the first {STREAM_VALIDATION_DOCUMENTS} documents, which streaming holds out for validation: give "
            "validation, or leave streaming out"
        )
    elif config.validation is None:
        reason = f" (validation_fraction is {config.validation_fraction})"
    source = config.corpus if part == "training" or config.validation is None else config.validation
    raise LabError(f"{source} contains no text for {part}{reason}; documents of only whitespace do not count")


def _refuse_short(
    sequences: Documents, documents: Documents, part: str, tokenizer: PreTrainedTokenizerFast, config: DataConfig
) -> None:
    if next(iter(sequences), None) is not None:
        return
    tokens = count_tokens(documents, tokenizer)
    source = config.corpus if part == "training" or config.validation is None else config.validation
    raise LabError(
        f"{source}: the {tokens} tokens for {part} do not fill one sequence of {config.sequence_length}: take more "
        "text or a smaller sequence_length"
    )
