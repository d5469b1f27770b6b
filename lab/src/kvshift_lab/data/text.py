"""Load text for training: packed training and validation sequences, and the tokenizer that made them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import datasets
from transformers import PreTrainedTokenizerFast

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.config import DataConfig, check_data_config
from kvshift_lab.data.packing import pack_documents, pack_stream
from kvshift_lab.data.sources import STREAM_VALIDATION_DOCUMENTS, Documents, load_documents
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
    tokenizer = make_tokenizer(config, documents, tokenizer_folder)
    layout = (tokenizer, config.sequence_length, config.packing)

    validation = pack_documents(held_out, *layout)
    _refuse_short(validation, "validation", config)
    layout = (*layout, config.periodic)
    if isinstance(documents, datasets.Dataset):
        train = pack_documents(documents, *layout)
        _refuse_short(train, "training", config)
        return TextData(train, validation, tokenizer)
    _refuse_short(pack_stream(documents, *layout), "training", config)
    return TextData(pack_stream(documents, *layout, seed=seed), validation, tokenizer)


def _refuse_short(sequences: Documents, part: str, config: DataConfig) -> None:
    """Raise a LabError unless the text for training or validation, `part`, fills a sequence."""
    if next(iter(sequences), None) is not None:
        return
    source = config.corpus if part == "training" or config.validation is None else config.validation
    reason = ""
    if config.validation is None:
        reason = f" (validation_fraction is {config.validation_fraction})"
        if config.streaming:
            reason = f" (without validation, streaming holds out the first {STREAM_VALIDATION_DOCUMENTS} documents)"
    raise LabError(
        f"{source}: the text for {part}{reason} does not fill one sequence of {config.sequence_length} tokens: take "
        "more text or a smaller sequence_length"
    )
