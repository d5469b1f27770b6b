"""Find and read local files: .txt, .md, .jsonl, .json (plain or compressed) and .parquet.

Hugging Face datasets reads .parquet. Its readers of text and JSON are not used, because datasets 5.2 changes texts
without a word: a number among the texts puts quotes around the other texts of the same 10 MB, a truncated .zst file is
a shorter text, a compressed file is decoded in the encoding of the locale, and line ends become "\\n".
"""

from __future__ import annotations

import codecs
import difflib
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from kvshift_lab.core.errors import LabError

_COMPRESSIONS = (".gz", ".xz", ".zst")

# Metadata files in a folder of data, which Hugging Face datasets skips, too.
_ABOUT_THE_DATA = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")

# Path, size in bytes and modification time in ns, which show whether a file has changed since this process read it.
FileStamp = tuple[str, int, int]


def bundled_corpora() -> list[str]:
    """Return the sorted names of the corpora that are part of the package."""
    return sorted(file.name.removesuffix(".txt") for file in _corpora().iterdir() if file.name.endswith(".txt"))


def find_corpus(corpus: str, option: str) -> tuple[FileStamp, ...] | None:
    """Return the files of a bundled corpus, or those that `find_files` finds; None for a hub dataset.

    Raises:
        LabError: `corpus` is none of these, or `find_files` raises an error. The message names `option`.
    """
    if corpus in bundled_corpora():
        return find_files(str(_corpora() / f"{corpus}.txt"), option)
    path = Path(corpus).expanduser()
    if path.exists() or path.is_symlink() or glob.has_magic(corpus):
        return find_files(corpus, option)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", corpus) and _format(path) not in _READERS:
        return None
    close = difflib.get_close_matches(corpus, bundled_corpora(), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise LabError(
        f"{option}: {corpus!r} is neither a bundled corpus ({', '.join(bundled_corpora())}){hint}, nor a file or "
        "folder that exists, nor a hub dataset (owner/name)"
    )


def find_texts(
    corpus: str, validation: str | None
) -> tuple[tuple[FileStamp, ...] | None, tuple[FileStamp, ...] | None]:
    """Return the files of a corpus and of its validation text; None for a hub dataset or if there is no such text.

    Raises:
        LabError: see `find_corpus`.
    """
    files = find_corpus(corpus, "corpus")
    if files is None or validation is None:  # for a hub dataset, `validation` is a split
        return files, None
    return files, find_files(validation, "validation")


def _corpora() -> Path:
    return Path(str(resources.files("kvshift_lab.data") / "corpora"))


def find_files(pattern: str, option: str) -> tuple[FileStamp, ...]:
    """Return the files that `pattern` matches, sorted by path: a file, a folder (searched recursively) or a glob.

    Hidden names below a folder are skipped, as are those that a glob does not match explicitly; see `_files_in`.

    Raises:
        LabError: there is no file; a named or matched file has an unknown format; or one of the files, also in a
            folder, is a broken link or not a regular file. The message names `option` and the path.
    """
    path = Path(pattern).expanduser()
    formats = f"a supported format ({', '.join(_READERS)}, each but the last also with {', '.join(_COMPRESSIONS)})"
    if path.is_dir():
        found = _files_in(path, option)
        if not found:
            raise LabError(f"{option}: the folder {pattern} contains no file in {formats}; hidden files are ignored")
    elif path.exists() or path.is_symlink():
        found = [path]
    else:
        found = [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if not file.is_dir()]
        found = [file for file in found if _private_folders(file) == _private_folders(path)]
        if not found:
            raise LabError(f"{option}: no such file or folder, and no file matches: {pattern}")
    for file in found:
        if file.is_symlink() and not file.exists():
            raise LabError(f"{option}: {file} links to {file.readlink()}, which does not exist")
        if not file.is_file():
            raise LabError(
                f"{option}: {file} is not a regular file (a pipe, socket or device): write its text to a file"
            )
        if _format(file) not in _READERS:
            raise LabError(f"{option}: {file} is not in {formats}; see docs/data.md for tables")
    return tuple(map(file_stamp, found))


def file_stamp(file: Path) -> FileStamp:
    """Return the stamp of a file."""
    stat = file.stat()  # the path is not resolved: links in the caches of the hub point to names without a suffix
    return str(file.absolute()), stat.st_size, stat.st_mtime_ns


@cache
def file_digest(stamp: FileStamp) -> str:
    """Return the SHA-256 of a file's bytes, which are read once per process unless the file's size or time changes."""
    try:
        with open(stamp[0], "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise LabError(f"{stamp[0]} cannot be read: {error.strerror}") from error


def text_digest(files: tuple[FileStamp, ...]) -> str:
    """Return a digest (16 hexadecimal digits) of the formats and bytes of files, in order, and not of their names."""
    parts = [(_format(Path(stamp[0])), file_digest(stamp)) for stamp in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _files_in(folder: Path, option: str) -> list[Path]:
    """Return the data files of a folder and its subfolders, including linked ones, and all that is no regular file.

    Hidden names (".git", "._a.txt") and folders such as "__pycache__" are skipped, as in Hugging Face datasets.
    """

    def refuse(error: OSError) -> None:
        raise LabError(f"{option}: cannot read the folder {error.filename}: {error.strerror}") from error

    found: list[Path] = []
    seen: dict[Path, str] = {}  # from the resolved path of each folder to the path by which it was reached
    for name, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := Path(name).resolve()) in seen:
            raise LabError(f"{option}: {name} is the same folder as {seen[real]}: its texts would be read twice")
        seen[real] = name
        folders[:] = sorted(below for below in folders if not below.startswith((".", "__")))
        found += [Path(name, file) for file in files if not file.startswith(".")]
    data = (file for file in found if _format(file) in _READERS and file.name not in _ABOUT_THE_DATA)
    return sorted({*data, *(file for file in found if not file.is_file())})


def _private_folders(path: Path) -> int:
    """Return the number of folders in a path or glob that start with "__"; a glob must name these explicitly."""
    return sum(part.startswith("__") for part in path.parent.parts)


def read_files(
    files: tuple[FileStamp, ...], column: str, option: str = "--data.text-column"
) -> Iterator[dict[str, Any]]:
    """Yield a row {"text": str} for each document; a null is an empty text in every format.

    A document is a .txt or .md file; a line of a .jsonl or .json file, or an element (an object or a text) of the
    array in it; or a record of a .parquet file.

    Raises:
        LabError: a file cannot be read or is damaged, or `column` is missing or does not hold text. The message names
            the file, in JSON also the line, and `option` as the option that selects the column.
    """
    for name, *_ in files:
        path = Path(name)
        try:
            for text in _READERS[_format(path)](path, column, option):
                yield {"text": text or ""}
        except LabError:
            raise
        except Exception as error:  # the disk, the compressions, Arrow and datasets raise exceptions of many types
            raise LabError(f"cannot read {path}: {error or type(error).__name__}") from error


def check_text_column(features: datasets.Features, column: str, where: str, option: str) -> None:
    """Raise a LabError that begins with `where` unless `column` is there and holds text or only nulls."""
    if column not in features:
        raise _no_column(where, column, features, option)
    if getattr(features[column], "dtype", None) not in ("string", "large_string", "string_view", "null"):
        raise _no_text(where, column, str(features[column]))


def _no_column(where: str, column: str, existing: Iterable[str], option: str) -> LabError:
    names = ", ".join(existing) or "none"
    return LabError(
        f"{where}: no text_column {column!r}; there are: {names}: choose the one with the text by {option} NAME"
    )


def _no_text(where: str, column: str, kind: str) -> LabError:
    return LabError(f"{where}: text_column {column!r} must hold text, got {kind} (docs/data.md: converting chats)")


def _read_whole(path: Path, column: str, option: str) -> Iterator[str]:
    with _open(path) as file:
        yield file.read().decode("utf-8-sig")


def _read_json(path: Path, column: str, option: str) -> Iterator[str | None]:
    with _open(path) as file:
        first = True
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            if first and line.lstrip().startswith(b"["):
                for index, row in enumerate(_parse(line + file.read(), column, str(path)), 1):
                    row = row if isinstance(row, dict) else {column: row}
                    yield _text(row, column, f"{path}, element {index}", option)
                return
            first = False
            where = f"{path}, line {number}"
            yield _text(_parse(line, column, where), column, where, option)


def _parse(content: bytes, column: str, where: str) -> Any:
    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if sum(key == column for key, _ in pairs) > 1:  # json.loads would keep the last one
            raise LabError(f"{where}: {column!r} occurs twice in one object: rename one of them")
        return dict(pairs)

    try:
        # Integers as floats, because Python refuses those of more than 4,300 digits.
        return json.loads(content.decode(), object_pairs_hook=to_dict, parse_int=float)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        reason = str(error).replace(": line 1 column", " at column")  # `where` names the line of the file
        raise LabError(f"{where}: not JSON: {reason}") from None


def _text(row: Any, column: str, where: str, option: str) -> str | None:
    if not isinstance(row, dict):
        raise LabError(f"{where}: must be a JSON object, got {_kind(row)}")
    if column not in row:
        raise _no_column(where, column, row, option)
    text = row[column]
    if not isinstance(text, str | None):
        raise _no_text(where, column, _kind(text))
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise LabError(f"{where}: half a surrogate pair at character {error.start} of the text") from None
    return text


def _kind(value: Any) -> str:
    kinds = {str: "a text", bool: "a boolean", float: "a number", list: "an array", dict: "an object"}
    return kinds.get(type(value), "null")


def _read_parquet(path: Path, column: str, option: str) -> Iterator[str | None]:
    schema = pq.read_schema(path)
    if schema.names.count(column) > 1:
        raise LabError(f"{path}: several columns are called {column!r}: rename all but one")
    check_text_column(datasets.Features.from_arrow_schema(schema), column, str(path), option)
    records = datasets.IterableDataset.from_parquet(glob.escape(str(path)), columns=[column], batch_size=1000)
    return (record[column] for record in records)


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".zst":
        # The package zstandard is not used, because it does not detect truncated files.
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))  # pyright: ignore[reportArgumentType]
    return path.open("rb")


def _format(path: Path) -> str:
    """Return the suffix of a path, ignoring that of a compression; parquet is compressed inside the file."""
    inner = path.with_suffix("") if path.suffix in _COMPRESSIONS else path
    return path.suffix if inner.suffix == ".parquet" else inner.suffix


_READERS = {
    ".txt": _read_whole,
    ".md": _read_whole,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
