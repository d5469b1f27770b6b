"""Load the documents of a corpus for training and validation.

Every source becomes a dataset with a single column, "text", and one document per row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.dataset_cache import cached_dataset, fingerprint
from kvshift_lab.data.files import FileStamp, check_text_column, find_corpus, find_texts, read_files, text_digest

Documents = datasets.Dataset | datasets.IterableDataset

# Number of documents held out from the start of a stream; its length, and thus a fraction of it, is unknown.
STREAM_VALIDATION_DOCUMENTS = 1000

# large_string has 64-bit offsets, because a document may be larger than 2 GiB.
_FEATURES = datasets.Features({"text": datasets.Value("large_string")})


def load_documents(config: DataConfig) -> tuple[Documents, datasets.Dataset]:
    """Return the training documents and the validation documents, which do not overlap.

    Raises:
        LabError: the text cannot be found or read, or the two sets would overlap.
    """
    files, held_out = find_texts(config.corpus, config.validation)
    if files is None:
        return _hub(config)
    _refuse_hub_options(config)
    return _local(config, files, held_out)


def read_text(config: DataConfig, option: str) -> Iterator[str]:
    """Return the documents of the whole corpus, in order, without those that contain only white space.

    Nothing is held out. This is for commands whose option is called --text-column instead of --data.text-column.

    Raises:
        LabError: the text cannot be found (the message names `option`) or read.
    """
    files = find_corpus(config.corpus, option)
    if files is None:
        return texts(_hub_split(config, config.split, "--text-column"))
    _refuse_hub_options(config)
    return texts(read_files(files, config.text_column, "--text-column"))


def texts(documents: Iterable[Any]) -> Iterator[str]:
    """Return an iterator over the documents that contain more than white space, in order."""
    return (text for text in _column(documents) if text and not text.isspace())


def _column(documents: Iterable[Any]) -> Iterator[str]:
    try:
        for row in documents:
            yield row["text"] or ""
    except LabError:  # names the file
        raise
    except Exception as error:  # a stream of the hub: HTTP and the formats raise exceptions of many types
        raise LabError(f"corpus: the dataset cannot be read to its end: {error or type(error).__name__}") from error


def _local(
    config: DataConfig, files: tuple[FileStamp, ...], held_out: tuple[FileStamp, ...] | None
) -> tuple[Documents, datasets.Dataset]:
    if held_out is None:
        if config.streaming:
            return _head_held_out(_stream(files, config.text_column))
        return _tail_held_out(_read(files, config.text_column), config.validation_fraction)
    paths, held_out_paths = ({Path(name).resolve() for name, *_ in stamps} for stamps in (files, held_out))
    if both := sorted(paths & held_out_paths):
        raise LabError(f"validation: {both[0]} is also in corpus {config.corpus}")
    train = (_stream if config.streaming else _read)(files, config.text_column)
    return train, _read(held_out, config.text_column)


def _read(files: tuple[FileStamp, ...], column: str) -> datasets.Dataset:
    return cached_dataset(
        read_files, _FEATURES, fingerprint("files", text_digest(files), column), files=files, column=column
    )


def _stream(files: tuple[FileStamp, ...], column: str) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(
        read_files, features=_FEATURES, gen_kwargs={"files": files, "column": column}
    )


def _hub(config: DataConfig) -> tuple[Documents, datasets.Dataset]:
    if config.validation is not None and _may_overlap(config.split, config.validation):
        raise LabError(
            f"validation: the split {config.validation} is also trained on (split {config.split}), or may be; expected "
            "other splits, or parts of one such as train[:90%] and train[90%:]"
        )
    train = _hub_split(config, config.split)
    if config.validation is None:
        if isinstance(train, datasets.IterableDataset):
            return _head_held_out(train)
        return _tail_held_out(train, config.validation_fraction)
    held_out = _hub_split(config, config.validation)
    if isinstance(held_out, datasets.IterableDataset):
        held_out = _collect(held_out.take(STREAM_VALIDATION_DOCUMENTS))
    return train, held_out


def _may_overlap(one: str, other: str) -> bool:
    """Return True unless two expressions for splits name others, or parts of one that do not overlap."""
    first, second = ([_part(text.strip()) for text in expression.split("+")] for expression in (one, other))
    return any(
        "all" in (name, other_name)
        or (name == other_name and not (unit == other_unit and (end <= other_begin or other_end <= begin)))
        for name, unit, begin, end in first
        for other_name, other_unit, other_begin, other_end in second
    )


def _part(text: str) -> tuple[str, str, float, float]:
    """Return name, unit, begin and end of a part of a split, such as train[10%:20%]; the whole for what is no range."""
    found = re.fullmatch(r"(.+)\[(?:(\d+)(%?))?:(?:(\d+)(%?))?\]", text)
    if found is None or (found[2] and found[4] and found[3] != found[5]):
        return text.split("[")[0], "", 0, math.inf
    name, begin, unit, end, other_unit = found.groups()
    return name, unit or other_unit or "", float(begin or 0), float(end or math.inf)


def _hub_split(config: DataConfig, split: str, column_option: str = "--data.text-column") -> Documents:
    try:
        documents = datasets.load_dataset(config.corpus, config.hub_config, split=split, streaming=config.streaming)
        if isinstance(documents, datasets.IterableDataset) and documents.features is None:
            documents = documents._resolve_features()  # reads the first row: this format does not declare its columns
    except Exception as error:  # the hub, HTTP, the disk and the formats raise exceptions of many types
        raise LabError(
            f"corpus: {config.corpus!r} is not a file or folder here, and loading it from the hub failed: "
            f"{error.__cause__ or error}"
        ) from error
    check_text_column(
        documents.features or datasets.Features(), config.text_column, f"{config.corpus}, split {split}", column_option
    )
    documents = documents.select_columns([config.text_column])
    return documents if config.text_column == "text" else documents.rename_column(config.text_column, "text")


def _head_held_out(stream: datasets.IterableDataset) -> tuple[datasets.IterableDataset, datasets.Dataset]:
    return stream.skip(STREAM_VALIDATION_DOCUMENTS), _collect(stream.take(STREAM_VALIDATION_DOCUMENTS))


def _collect(stream: datasets.IterableDataset) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": list(_column(stream))}, features=_FEATURES)


def _tail_held_out(documents: datasets.Dataset, fraction: float) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Hold out the last documents or, if `fraction` of them is less than one document, the last characters."""
    count = len(documents)
    held_out = int(count * fraction)
    if held_out:
        return documents.select(range(count - held_out)), documents.select(range(count - held_out, count))
    number, character = _split_position(documents, 1 - fraction)
    parts = (
        cached_dataset(
            _cut,
            _FEATURES,
            fingerprint("cut", documents._fingerprint, number, character, after),
            documents=documents,
            number=number,
            character=character,
            after=after,
        )
        for after in (False, True)
    )
    return next(parts), next(parts)


def _split_position(documents: datasets.Dataset, fraction: float) -> tuple[int, int]:
    """Return the document index and character index after `fraction` of all characters.

    The position is moved to the start of the next line, if the document has one; not to the end of the text.
    """
    left = int(sum(map(len, _column(documents))) * fraction)
    for number, text in enumerate(_column(documents)):
        if left < len(text):
            line_end = text.find("\n", left)
            is_last = number == len(documents) - 1 and line_end == len(text) - 1
            return number, left if line_end < 0 or is_last else line_end + 1
        left -= len(text)
    return len(documents), 0


def _cut(documents: datasets.Dataset, number: int, character: int, after: bool) -> Iterator[dict[str, Any]]:
    """Cut the documents at a character of document `number`; yield the text before it or, with `after`, from it on."""
    for index, text in enumerate(_column(documents)):
        cut = len(text) if index < number else 0 if index > number else character
        yield {"text": text[cut:] if after else text[:cut]}


def _refuse_hub_options(config: DataConfig) -> None:
    for option, neutral in (("hub_config", None), ("split", "train")):
        value = getattr(config, option)
        if value != neutral:
            raise LabError(f"{option} is only for hub datasets, got {value!r} with corpus {config.corpus}")
