"""Documents in local files: .txt, .jsonl and .parquet, plain or compressed.

Hugging Face datasets has loaders for the three formats; they are not used, since in datasets 5.2 they read a truncated
.zst file as a shorter one, refuse .parquet.gz, name neither file nor line of malformed JSON, and change line ends.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvshift.lab.errors import LabError

__all__ = ["FORMATS", "FileStamp", "find_files", "is_data_file", "read_files", "read_pieces"]

FORMATS = (".txt", ".jsonl", ".parquet")
_COMPRESSIONS = (".gz", ".xz", ".zst")

# Read of a .txt file at once.
_PART_BYTES = 2**20

# Columns of a .parquet file that hold text; one of type null holds nothing but nulls.
_TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view(), pa.null())

# Path, bytes, time of change in ns: what tells whether a file is still the one that was read before.
FileStamp = tuple[str, int, int]


def is_data_file(path: Path) -> bool:
    """Whether the name ends in a known format, with or without a compression."""
    return _format(path) in FORMATS


def find_files(pattern: str, option: str) -> tuple[FileStamp, ...]:
    """The files that `pattern` stands for, sorted by path: a file, a folder (searched at every depth) or a glob.

    Hidden names below a folder are left out, and so are those that a glob does not spell out; see `_files_in`.

    Raises:
        LabError: there is none; a file that was named or matched is of no known format; or a link leads nowhere, or
            something is no regular file, there or in the folder. `option` and the path are named.
    """
    path = Path(pattern).expanduser()
    known = f"known are {', '.join(FORMATS)}, each also with {', '.join(_COMPRESSIONS)}"
    if path.is_dir():
        found = list(_files_in(path, option, {}))
        if not found:
            raise LabError(
                f"{option}: the folder {pattern} holds no file of a known format; {known}; hidden names are left out"
            )
    elif path.exists() or path.is_symlink():
        found = [path]
    else:
        found = [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if not file.is_dir()]
        found = [file for file in found if _private_folders(file) == _private_folders(path)]
        if not found:
            raise LabError(f"{option}: no such file or folder, and no file matches: {pattern}")
    for file in found:
        if not file.is_file():
            raise _no_file(file, option)
        if not is_data_file(file):
            raise LabError(f"{option}: {file} is of no known format; {known}")
    # not resolved: a link may point to a file without a suffix, as in the caches of the hub
    stats = [(str(file.absolute()), file.stat()) for file in found]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _files_in(folder: Path, option: str, seen: dict[Path, Path]) -> Iterator[Path]:
    """The data files of a folder and its subfolders, linked ones included, in the order of their paths.

    As Hugging Face datasets does, hidden names (".git", "._a.txt") and folders such as "__pycache__" are left out.
    `seen` holds the folders that were entered, by what they resolve to.
    """
    real = folder.resolve()
    if real in seen:
        raise LabError(f"{option}: {folder} is the same folder as {seen[real]}: its texts would be read twice")
    seen[real] = folder
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise LabError(f"{option}: cannot read the folder {folder}: {error.strerror}") from error
    for path in paths:
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if not path.name.startswith("__"):
                yield from _files_in(path, option, seen)
        elif not path.is_file():
            raise _no_file(path, option)
        elif is_data_file(path):
            yield path


def _private_folders(path: Path) -> int:
    """How many folders of a path or a glob are named like "__pycache__", which a glob matches only where it says so."""
    return sum(part.startswith("__") for part in path.parent.parts)


def _no_file(path: Path, option: str) -> LabError:
    if path.is_symlink() and not path.exists():
        return LabError(f"{option}: {path} links to {path.readlink()}, which does not exist")
    return LabError(f"{option}: {path} is not a regular file (a pipe, socket or device): write its text to a file")


def read_files(files: tuple[FileStamp, ...], column: str) -> Iterator[dict[str, Any]]:
    """One {"text": str} a document; see `read_pieces`."""
    pieces: list[str] = []
    for text, last in read_pieces(files, column):
        pieces.append(text)
        if last:
            yield {"text": "".join(pieces)}
            pieces = []


def read_pieces(files: tuple[FileStamp, ...], column: str) -> Iterator[tuple[str, bool]]:
    """The documents in pieces that fit into memory, each with whether it is the last of its document.

    A document is a .txt file, read a part at a time, or a row of a .jsonl or .parquet file, which is one piece. Text is
    taken as it is, line ends included; a byte order mark at the start of a file is dropped. A null, in whatever format,
    is an empty text.

    Raises:
        LabError: a file cannot be read or is damaged, or `column` is not there or holds no text; the file is named,
            and the line or byte.
    """
    # EOFError, LZMAError: a compressed file that ends early or is damaged; OSError covers gzip and zstd. Local, since
    # a generator that is closed when Python ends finds the modules gone.
    faults = (OSError, EOFError, lzma.LZMAError, pa.ArrowException)
    for name, *_ in files:
        path = Path(name)
        read = _READERS[_format(path)]
        try:
            yield from read(path, column)
        except faults as error:
            raise LabError(f"cannot read {path}: {error or type(error).__name__}") from error


def _read_txt(path: Path, column: str) -> Iterator[tuple[str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    held: str | None = None  # until it is known whether more follows
    begin = 0  # of what is decoded next, in bytes
    with _open(path) as file:
        while content := file.read(_PART_BYTES):
            text = _decode(decoder, content, begin, path)
            if held is None:
                held = text.removeprefix("\ufeff")
            else:
                yield held, False
                held = text
            begin += len(content)
    yield (held or "") + _decode(decoder, b"", begin, path), True


def _decode(decoder: codecs.IncrementalDecoder, content: bytes, begin: int, path: Path) -> str:
    begin -= len(decoder.getstate()[0])  # the start of a character whose end is in `content`
    try:
        return decoder.decode(content, final=not content)
    except UnicodeDecodeError as error:
        found = error.object[error.start]
        raise LabError(f"{path}: not UTF-8: byte {begin + error.start} is 0x{found:02x} ({error.reason})") from None


def _read_jsonl(path: Path, column: str) -> Iterator[tuple[str, bool]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = _parse(line.decode("utf-8"), column, where)
            except UnicodeDecodeError as error:
                raise LabError(f"{where}: not UTF-8: byte {error.start} of the line ({error.reason})") from None
            except json.JSONDecodeError as error:
                raise LabError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
            except RecursionError:
                raise LabError(f"{where}: JSON nested too deeply") from None
            if not isinstance(row, dict):
                raise LabError(f"{where}: must be a JSON object, got {type(row).__name__}")
            if column not in row:
                raise _no_column(where, column, list(row))
            text = row[column]
            if text is None:
                text = ""
            if not isinstance(text, str):
                raise LabError(f"{where}: text_column {column!r} must hold text, got {type(text).__name__}")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise LabError(f"{where}: half a surrogate pair at character {error.start} of the text") from None
            yield text, True


def _parse(content: str, column: str, where: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if sum(name == column for name, _ in pairs) > 1:
            raise LabError(f"{where}: {column!r} stands twice in one object: rename one of them")
        return dict(pairs)

    # the hook takes time, and Python keeps the last of two silently
    twice = content.count(json.dumps(column)) > 1 or content.count(f'"{column}"') > 1
    return json.loads(content, object_pairs_hook=once if twice else None)


def _read_parquet(path: Path, column: str) -> Iterator[tuple[str, bool]]:
    with _open(path) as stream:
        # A parquet file is read from its end: a compressed one has to be decompressed in memory, whole.
        source = stream if path.suffix == ".parquet" else io.BytesIO(stream.read())
        file = pq.ParquetFile(source)
        schema = file.schema_arrow
        if column not in schema.names:
            raise _no_column(str(path), column, schema.names)
        if (count := schema.names.count(column)) > 1:
            raise LabError(f"{path}: {count} columns are called {column!r}: rename all but one")
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if kind not in _TEXT_TYPES:
            raise LabError(f"{path}: text_column {column!r} must hold text, got {kind}")
        for batch in file.iter_batches(batch_size=1000, columns=[column]):
            try:
                texts = batch.column(column).to_pylist()  # a struct's field may have the same path and be there too
            except UnicodeDecodeError as error:
                raise LabError(f"{path}: text_column {column!r} holds text that is not UTF-8: {error}") from None
            for text in texts:
                yield text or "", True


def _no_column(where: str, column: str, existing: list[str]) -> LabError:
    return LabError(f"{where}: no text_column {column!r}; there are: {', '.join(existing) or 'none'}")


def _format(path: Path) -> str:
    """The suffix before that of a compression."""
    return (path.with_suffix("") if path.suffix in _COMPRESSIONS else path).suffix


_READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".zst":
        # Not the package zstandard, which takes a truncated file for a whole one.
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))  # pyright: ignore[reportArgumentType]
    return path.open("rb")
