"""Read documents from local files: .txt, .md, .jsonl, .json and .parquet, plain or compressed.

Hugging Face datasets has loaders for these formats. They are not used because in datasets 5.2 they accept a truncated
.zst file as a shorter one, reject .parquet.gz, do not name file and line of malformed JSON, and change line ends.
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
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvshift_lab.core.errors import LabError

FORMATS = (".txt", ".md", ".jsonl", ".json", ".parquet")
_COMPRESSIONS = (".gz", ".xz", ".zst")

# Metadata files in a folder of data, which Hugging Face datasets skips, too.
_ABOUT_THE_DATA = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")

# Names of columns that usually hold chat messages.
_CHATS = ("messages", "conversations", "conversation")

# Number of bytes of a .txt file to read at a time.
_PART_BYTES = 2**20

# Types of .parquet columns that can hold text; a column of type null contains only nulls.
_TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view(), pa.null())

# Path, size in bytes and modification time in ns, which show whether a file has changed since this process read it.
FileStamp = tuple[str, int, int]


def is_data_file(path: Path) -> bool:
    """Return True if the name has a supported suffix, with or without the suffix of a compression."""
    return _format(path) in FORMATS


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
    if re.fullmatch(r"[\w.-]+/[\w.-]+", corpus) and not is_data_file(path):
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
    known = f"{', '.join(FORMATS)}, each also with {', '.join(_COMPRESSIONS)}"
    if path.is_dir():
        found = list(_files_in(path, option, {}))
        if not found:
            raise LabError(
                f"{option}: the folder {pattern} contains no file in a supported format ({known}); hidden files are "
                f"ignored{_table_hint(path)}"
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
            raise LabError(f"{option}: {file} is not in a supported format ({known}){_table_hint(file)}")
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


def _files_in(folder: Path, option: str, seen: dict[Path, Path]) -> Iterator[Path]:
    """Yield the data files of a folder and its subfolders, including linked ones, in the order of their paths.

    Hidden names (".git", "._a.txt") and folders such as "__pycache__" are skipped, as in Hugging Face datasets.
    `seen` maps the resolved path of each visited folder to its original path.
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
        elif path.name not in _ABOUT_THE_DATA and is_data_file(path):
            yield path


def _private_folders(path: Path) -> int:
    """Return the number of folders in a path or glob that start with "__"; a glob must name these explicitly."""
    return sum(part.startswith("__") for part in path.parent.parts)


def _no_file(path: Path, option: str) -> LabError:
    if path.is_symlink() and not path.exists():
        return LabError(f"{option}: {path} links to {path.readlink()}, which does not exist")
    return LabError(f"{option}: {path} is not a regular file (a pipe, socket or device): write its text to a file")


def _table_hint(path: Path) -> str:
    """Return a hint for an error message: how to convert `path`, or a file in this folder, if it is .csv or .tsv."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if _format(file) in (".csv", ".tsv"):
            separator = r", sep='\t'" if _format(file) == ".tsv" else ""
            return f"; to convert {file.name}: " + _python(
                f"datasets.Dataset.from_csv({str(file)!r}{separator}).to_json({_converted(file)!r})"
            )
    return ""


def chat_hint(columns: Iterable[str], load: str, out: str) -> str:
    """Return a hint for an error message: how to turn a column of chat messages into texts; "" if there is none.

    `load` is Python code that loads the dataset, and `out` is the file to write.
    """
    chats = next((name for name in _CHATS if name in columns), None)
    if chats is None:
        return ""
    text = rf"'\n\n'.join(m.get('content') or m.get('value') or '' for m in row['{chats}'])"
    return f"; {chats!r} contains chats; to convert each to a text: " + _python(
        f"datasets.{load}.map(lambda row: {{'text': {text}}}).select_columns('text').to_json({out!r})"
    )


def _chat_hint_for_file(path: Path, columns: Iterable[str]) -> str:
    kind = "parquet" if _format(path) == ".parquet" else "json"
    return chat_hint(columns, f"Dataset.from_{kind}({str(path)!r})", _converted(path))


def _converted(path: Path) -> str:
    return str(path.with_name(f"{path.name.removesuffix(path.suffix).split('.')[0]}-text.jsonl"))


def _python(code: str) -> str:
    code = f"import datasets; {code}"
    return "python -c " + (f'"{code}"' if not set(code) & set('"$`') else shlex.quote(code))


def read_files(files: tuple[FileStamp, ...], column: str) -> Iterator[dict[str, Any]]:
    """Yield a row {"text": str} for each document; see `read_pieces`."""
    pieces: list[str] = []
    for text, last in read_pieces(files, column):
        pieces.append(text)
        if last:
            yield {"text": "".join(pieces)}
            pieces = []


def read_pieces(
    files: tuple[FileStamp, ...], column: str, option: str = "--data.text-column"
) -> Iterator[tuple[str, bool]]:
    """Yield the documents in pieces that fit into memory, each with a flag for the last piece of a document.

    A document is either a .txt or .md file, read in several pieces, or a row of another file, read as one piece. A row
    of a .jsonl or .json file is an object on one line, or an element (an object or a text) of the array in the file.
    Text is not changed, including its line ends, except that a byte order mark at the start of a file is dropped. A
    null is an empty text in every format.

    Raises:
        LabError: a file cannot be read or is damaged, or `column` is missing or does not hold text. The message names
            the file and the line or byte, and `option` as the option that selects the column.
    """
    # A compressed file that is truncated or damaged raises EOFError or LZMAError, or OSError for gzip and zstd. The
    # tuple is local because a generator that is closed when Python exits can no longer access the modules.
    faults = (OSError, EOFError, lzma.LZMAError, pa.ArrowException)
    for name, *_ in files:
        path = Path(name)
        read = _READERS[_format(path)]
        try:
            yield from read(path, column)
        except _NoColumnError as error:
            hint = _chat_hint_for_file(path, error.columns)
            raise LabError(f"{error}: choose the one with the text by {option} NAME{hint}") from None
        except _NoTextError as error:
            raise LabError(f"{error}{_chat_hint_for_file(path, error.columns)}") from None
        except faults as error:
            if "requires too much memory" in str(error):
                raise LabError(
                    f"cannot read {path}: it was compressed with zstd --long, and takes more than 128 MiB of memory; "
                    f"unpack it with: zstd -d --long=31 {shlex.quote(str(path))}, and compress it again without --long"
                ) from error
            raise LabError(f"cannot read {path}: {error or type(error).__name__}") from error


def _read_txt(path: Path, column: str) -> Iterator[tuple[str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    held: str | None = None  # a piece that is held back until it is known whether another one follows
    begin = 0  # offset in bytes of the content to decode next
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
    begin -= len(decoder.getstate()[0])  # bytes of a character that continues in `content`
    try:
        return decoder.decode(content, final=not content)
    except UnicodeDecodeError as error:
        found = error.object[error.start]
        raise LabError(f"{path}: not UTF-8: byte {begin + error.start} is 0x{found:02x} ({error.reason})") from None


def _read_json(path: Path, column: str) -> Iterator[tuple[str, bool]]:
    with _open(path) as file:
        first = True
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            if first and (line.lstrip().startswith(b"[") or line.strip() == b"{"):  # an array or a multi-line object
                rows = _parse(line + file.read(), column, str(path), path, number)
                for index, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
                    where = f"{path}, element {index}"
                    yield _text(row if isinstance(row, dict) else {column: row}, column, where), True
                return
            first = False
            where = f"{path}, line {number}"
            row = _parse(line.rstrip(b"\r\n"), column, where, path, number)
            if not isinstance(row, dict):
                raise LabError(f"{where}: must be a JSON object, got {type(row).__name__}")
            yield _text(row, column, where), True


def _parse(content: bytes, column: str, where: str, path: Path, number: int) -> Any:
    """Parse the JSON of line `number`, or of the rest of the file from this line on."""

    try:
        text = content.decode("utf-8")
        if any(text.count(key) > 1 for key in {f'"{column}"', json.dumps(column)}):
            return json.loads(text, object_pairs_hook=partial(_without_repeats, column, where))
        return json.loads(text)
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, byte = number + before.count(b"\n"), error.start - before.rfind(b"\n") - 1
        raise LabError(f"{path}, line {line}: not UTF-8: byte {byte} of the line ({error.reason})") from None
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg} at column {error.colno}"
        if error.msg == "Extra data" and error.lineno > 1:
            reason = "a second JSON value: must be one object per line, or one array of objects or texts"
        raise LabError(f"{path}, line {number + error.lineno - 1}: {reason}") from None
    except RecursionError:
        raise LabError(f"{where}: JSON nested too deeply") from None


def _without_repeats(column: str, where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return `pairs` as a dict, but raise a LabError if `column` is repeated; json.loads would keep only the last."""
    if sum(name == column for name, _ in pairs) > 1:
        raise LabError(f"{where}: {column!r} occurs twice in one object: rename one of them")
    return dict(pairs)


def _text(row: dict[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise _NoColumnError(where, column, list(row))
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise _NoTextError(where, column, type(text).__name__)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LabError(f"{where}: half a surrogate pair at character {error.start} of the text") from None
    return text


def _read_parquet(path: Path, column: str) -> Iterator[tuple[str, bool]]:
    with _open(path) as stream:
        # A parquet file is read from its end, so that a compressed one must be decompressed in memory as a whole.
        source = stream if path.suffix == ".parquet" else io.BytesIO(stream.read())
        file = pq.ParquetFile(source)
        schema = file.schema_arrow
        if column not in schema.names:
            raise _NoColumnError(str(path), column, schema.names)
        if (count := schema.names.count(column)) > 1:
            raise LabError(f"{path}: {count} columns are called {column!r}: rename all but one")
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if kind not in _TEXT_TYPES:
            raise _NoTextError(str(path), column, str(kind))
        for batch in file.iter_batches(batch_size=1000, columns=[column]):
            try:
                texts = batch.column(column).to_pylist()  # the batch may also have a struct's field of the same path
            except UnicodeDecodeError as error:
                raise LabError(f"{path}: text_column {column!r} holds text that is not UTF-8: {error}") from None
            for text in texts:
                yield text or "", True


class _NoColumnError(LabError):
    def __init__(self, where: str, column: str, existing: list[str]) -> None:
        super().__init__(f"{where}: no text_column {column!r}; there are: {', '.join(existing) or 'none'}")
        self.columns = existing


class _NoTextError(LabError):
    def __init__(self, where: str, column: str, kind: str) -> None:
        super().__init__(f"{where}: text_column {column!r} must hold text, got {kind}")
        self.columns = [column]


def _format(path: Path) -> str:
    """Return the suffix of a path, ignoring that of a compression."""
    return (path.with_suffix("") if path.suffix in _COMPRESSIONS else path).suffix


_READERS = {
    ".txt": _read_txt,
    ".md": _read_txt,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".zst":
        # The package zstandard is not used, because it does not detect truncated files.
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))  # pyright: ignore[reportArgumentType]
    return path.open("rb")
