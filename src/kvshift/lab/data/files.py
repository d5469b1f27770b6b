"""Documents in local files: .txt, .md, .jsonl, .json and .parquet, plain or compressed.

Hugging Face datasets has loaders for these formats; they are not used, since in datasets 5.2 they read a truncated
.zst file as a shorter one, refuse .parquet.gz, name neither file nor line of malformed JSON, and change line ends.
"""

from __future__ import annotations

import codecs
import difflib
import glob
import gzip
import io
import json
import lzma
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvshift.lab.core.errors import LabError

FORMATS = (".txt", ".md", ".jsonl", ".json", ".parquet")
_COMPRESSIONS = (".gz", ".xz", ".zst")

# Beside the data in a folder, and no data: what Hugging Face datasets passes over.
_ABOUT_THE_DATA = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")

# Columns of chat messages, and the keys that hold their text.
_CHATS = ("messages", "conversations", "conversation")

# Read of a .txt file at once.
_PART_BYTES = 2**20

# Columns of a .parquet file that hold text; one of type null holds nothing but nulls.
_TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view(), pa.null())

# Path, bytes, time of change in ns: what tells whether a file is still the one that was read before.
FileStamp = tuple[str, int, int]


def is_data_file(path: Path) -> bool:
    """Whether the name ends in a known format, with or without a compression."""
    return _format(path) in FORMATS


def is_local(corpus: str) -> bool:
    """Whether a corpus that is not a bundled one is a file, a folder or a glob; else it may be a hub dataset."""
    path = Path(corpus).expanduser()
    return path.exists() or path.is_symlink() or glob.has_magic(corpus)


def bundled_corpora() -> list[str]:
    """Names of the corpora that come with the package."""
    return sorted(file.name.removesuffix(".txt") for file in _corpora().iterdir() if file.name.endswith(".txt"))


def find_corpus(corpus: str, option: str) -> tuple[FileStamp, ...] | None:
    """The files of a bundled corpus, or those that `find_files` finds; None where it is a hub dataset.

    Raises:
        LabError: it is none of these, or `find_files` raises it. `option` is named.
    """
    if corpus in bundled_corpora():
        return find_files(str(_corpora() / f"{corpus}.txt"), option)
    if is_local(corpus):
        return find_files(corpus, option)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", corpus) and not is_data_file(Path(corpus)):
        return None
    close = difflib.get_close_matches(corpus, bundled_corpora(), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise LabError(
        f"{option}: {corpus!r} is neither a bundled corpus ({', '.join(bundled_corpora())}){hint}, nor a file or "
        "folder that exists, nor a hub dataset (owner/name)"
    )


def find_texts(
    corpus: str, validation: str | None, option: str = "corpus"
) -> tuple[tuple[FileStamp, ...] | None, tuple[FileStamp, ...] | None]:
    """The files of a corpus and of its validation text; None for a hub dataset, or without validation text.

    Raises:
        LabError: see `find_corpus`.
    """
    files = find_corpus(corpus, option)
    if files is None or validation is None:  # of a hub dataset, `validation` is a split
        return files, None
    return files, find_files(validation, "validation")


def _corpora() -> Path:
    return Path(str(resources.files("kvshift.lab.data") / "corpora"))


def find_files(pattern: str, option: str) -> tuple[FileStamp, ...]:
    """The files that `pattern` stands for, sorted by path: a file, a folder (searched at every depth) or a glob.

    Hidden names below a folder are left out, and so are those that a glob does not spell out; see `_files_in`.

    Raises:
        LabError: there is none; a file that was named or matched is of no known format; or a link leads nowhere, or
            something is no regular file, there or in the folder. `option` and the path are named.
    """
    path = Path(pattern).expanduser()
    known = f"{', '.join(FORMATS)}, each also with {', '.join(_COMPRESSIONS)}"
    if path.is_dir():
        found = list(_files_in(path, option, {}))
        if not found:
            raise LabError(
                f"{option}: the folder {pattern} contains no file in a supported format ({known}); hidden files are "
                f"ignored{_of_tables(path)}"
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
            raise LabError(f"{option}: {file} is not in a supported format ({known}){_of_tables(file)}")
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
        elif path.name not in _ABOUT_THE_DATA and is_data_file(path):
            yield path


def _private_folders(path: Path) -> int:
    """How many folders of a path or a glob are named like "__pycache__", which a glob matches only where it says so."""
    return sum(part.startswith("__") for part in path.parent.parts)


def _no_file(path: Path, option: str) -> LabError:
    if path.is_symlink() and not path.exists():
        return LabError(f"{option}: {path} links to {path.readlink()}, which does not exist")
    return LabError(f"{option}: {path} is not a regular file (a pipe, socket or device): write its text to a file")


def _of_tables(path: Path) -> str:
    """What an error adds where the path is a .csv or .tsv file, or a folder that holds one: how to convert it."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if _format(file) in (".csv", ".tsv"):
            separator = r", sep='\t'" if _format(file) == ".tsv" else ""
            return f"; to convert {file.name}: " + _python(
                f"datasets.Dataset.from_csv({str(file)!r}{separator}).to_json({_converted(file)!r})"
            )
    return ""


def of_chats(columns: Iterable[str], load: str, out: str) -> str:
    """What an error adds where a column holds the messages of chats: how to make each chat a text.

    `load` is Python that gives the dataset, `out` the file to write.
    """
    chats = next((name for name in _CHATS if name in columns), None)
    if chats is None:
        return ""
    text = rf"'\n\n'.join(m.get('content') or m.get('value') or '' for m in row['{chats}'])"
    return f"; {chats!r} contains chats; to convert each to a text: " + _python(
        f"datasets.{load}.map(lambda row: {{'text': {text}}}).select_columns('text').to_json({out!r})"
    )


def _of_chats_in(path: Path, columns: Iterable[str]) -> str:
    kind = "parquet" if _format(path) == ".parquet" else "json"
    return of_chats(columns, f"Dataset.from_{kind}({str(path)!r})", _converted(path))


def _converted(path: Path) -> str:
    return str(path.with_name(f"{path.name.removesuffix(path.suffix).split('.')[0]}-text.jsonl"))


def _python(code: str) -> str:
    code = f"import datasets; {code}"
    return "python -c " + (f'"{code}"' if not set(code) & set('"$`') else shlex.quote(code))


def read_files(files: tuple[FileStamp, ...], column: str) -> Iterator[dict[str, Any]]:
    """One {"text": str} a document; see `read_pieces`."""
    pieces: list[str] = []
    for text, last in read_pieces(files, column):
        pieces.append(text)
        if last:
            yield {"text": "".join(pieces)}
            pieces = []


def read_pieces(
    files: tuple[FileStamp, ...], column: str, option: str = "--data.text-column"
) -> Iterator[tuple[str, bool]]:
    """The documents in pieces that fit into memory, each with whether it is the last of its document.

    A document is a .txt or .md file, read a part at a time, or a row of another, which is one piece: a row of a .jsonl
    or .json file is an object on a line, or an element (an object or a text) of the array that the file holds. Text is
    taken as it is, line ends included; a byte order mark at the start of a file is dropped. A null, in whatever format,
    is an empty text.

    Raises:
        LabError: a file cannot be read or is damaged, or `column` is not there or holds no text; the file is named,
            and the line or byte; `option` is what chooses the column.
    """
    # EOFError, LZMAError: a compressed file that ends early or is damaged; OSError covers gzip and zstd. Local, since
    # a generator that is closed when Python ends finds the modules gone.
    faults = (OSError, EOFError, lzma.LZMAError, pa.ArrowException)
    for name, *_ in files:
        path = Path(name)
        read = _READERS[_format(path)]
        try:
            yield from read(path, column)
        except _NoColumnError as error:
            hint = _of_chats_in(path, error.columns)
            raise LabError(f"{error}: choose the one with the text by {option} NAME{hint}") from None
        except _NoTextError as error:
            raise LabError(f"{error}{_of_chats_in(path, error.columns)}") from None
        except faults as error:
            if "requires too much memory" in str(error):
                raise LabError(
                    f"cannot read {path}: it was compressed with zstd --long, and takes more than 128 MiB of memory; "
                    f"unpack it with: zstd -d --long=31 {shlex.quote(str(path))}, and compress it again without --long"
                ) from error
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


def _read_json(path: Path, column: str) -> Iterator[tuple[str, bool]]:
    with _open(path) as file:
        first = True
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            if first and (line.lstrip().startswith(b"[") or line.strip() == b"{"):  # an array, or an object on lines
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
    """The JSON of a line, or of the rest of the file from this line on."""

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
    """An object of JSON, of whose equal keys json.loads would take the last silently."""
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
        # A parquet file is read from its end: a compressed one has to be decompressed in memory, whole.
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
                texts = batch.column(column).to_pylist()  # a struct's field may have the same path and be there too
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
    """The suffix before that of a compression."""
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
        # Not the package zstandard, which takes a truncated file for a whole one.
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))  # pyright: ignore[reportArgumentType]
    return path.open("rb")
