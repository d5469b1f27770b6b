"""Local files: which ones a name stands for, that their texts come back, and that every fault is named."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.files import find_files, read_files

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
# All kinds of line ends and of separators that a reader might mistake for one, and characters of 1 to 4 bytes.
TEXT = "one\r\ntwo\rthree\n\n\u2028 \x85 \x0c é 語 🙂\t "


def parquet(table: pa.Table | dict) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), buffer)
    return buffer.getvalue()


def jsonl(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(path: Path, column: str = "text") -> list[str]:
    return [row["text"] for row in read_files(find_files(str(path), "corpus"), column)]


def complaint(path: Path, column: str = "text") -> str:
    with pytest.raises(LabError) as error:
        read(path, column)
    return str(error.value)


MANY = ["a", None, TEXT, "a", ""] * 700  # more than one batch of a parquet file
TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
]
BIG_INTEGER = b'{"text": "b", "n": ' + b"7" * 4301 + b"}"

# (name, content, texts)
READABLE: list[tuple[str, bytes, list[str]]] = [
    ("a.txt", TEXT.encode(), [TEXT]),
    ("a.md", TEXT.encode(), [TEXT]),
    ("a.txt", b"\xef\xbb\xbf" + "\ufeffkept".encode(), ["\ufeffkept"]),
    ("a.txt", b"", [""]),
    ("a.txt.gz", gzip.compress(b"one ", mtime=0) + gzip.compress(b"two", mtime=0), ["one two"]),
    ("a.txt.zst", zstandard.compress(b"one ") + zstandard.compress(b"two"), ["one two"]),
    ("a.jsonl", jsonl({"text": TEXT, "n": 1}, {"n": "x", "text": "b"}), [TEXT, "b"]),
    ("a.jsonl", jsonl({"text": None}, {"text": "b"}), ["", "b"]),
    ("a.jsonl", b"\xef\xbb\xbf" + jsonl({"text": "\ufeffkept"}) + b'\r\n  \n{"text": "b"}', ["\ufeffkept", "b"]),
    ("a.jsonl", b"", []),
    ("a.jsonl", b'{"text": "a"}\n' + BIG_INTEGER, ["a", "b"]),
    ("a.jsonl", jsonl({"text": "a"}, {"text": "b", "new": {"n": 1}}, {"text": "c", "new": 2}), ["a", "b", "c"]),
    ("a.jsonl", b'{"n": {"x": 1, "x": 2}, "text": "a", "n": "text", "m": {"text": 1}}', ["a"]),
    ("a.json", json.dumps([{"text": TEXT}, "b", {"n": 1, "text": None}, None], indent=1).encode(), [TEXT, "b", "", ""]),
    ("a.json", b"\n[" + BIG_INTEGER + b"]\n", ["b"]),
    ("a.json", b"[]", []),
    ("a.json", jsonl({"text": "a"}, {"text": "b"}), ["a", "b"]),
    ("a.parquet", parquet({"n": [1, 2, 3], "text": [TEXT, "b", None]}), [TEXT, "b", ""]),
    ("a.parquet", parquet({"text": pa.nulls(2)}), ["", ""]),
    ("a.parquet", parquet({"text": pa.array([], pa.string())}), []),
    ("a.parquet", parquet({"n": pa.array([["a"], None], pa.list_(pa.string_view())), "text": ["b", "c"]}), ["b", "c"]),
    ("a.parquet", parquet({"n": [{"text": "inner"}], "text": ["outer"]}), ["outer"]),
    *(("a.parquet", parquet({"n": range(3500), "text": pa.array(MANY).cast(kind)}), ["a", "", TEXT, "a", ""] * 700)
      for kind in TYPES),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "texts"), READABLE)
def test_texts_come_back(folder, name, content, texts):
    path = folder / name
    path.write_bytes(content)
    assert read(path) == texts

    if path.suffix not in (*COMPRESSIONS, ".parquet"):
        for suffix, compress in COMPRESSIONS.items():
            (folder / f"{name}{suffix}").write_bytes(compress(content))
            assert read(folder / f"{name}{suffix}") == texts


CHOOSE = "choose the one with the text by --data.text-column NAME"

# (name, content, what the message says after the path)
WRONG: list[tuple[str, bytes, str]] = [
    ("a.txt", "naïve".encode() + b" caf\xe9 ", "can't decode byte 0xe9 in position 10"),
    ("a.txt.gz", b"plain text", "Not a gzipped file"),
    ("a.txt.xz", b"plain text", "Input format not supported"),
    ("a.txt.zst", b"plain text", "ZSTD"),
    # A frame without a size, its window of 2^31 bytes, and one empty last block: zstd --long=31.
    ("a.txt.zst", bytes.fromhex("28b52ffd00a8010000"), "requires too much memory"),
    ("a.jsonl", jsonl({"text": "a"}) + b'\n{"text": oops}\n', ", line 3: not JSON: Expecting value at column 10"),
    ("a.jsonl", b'{"text": "a"', ", line 1: not JSON: Expecting ',' delimiter at column 13"),
    ("a.jsonl", b'{"text": "a"} {"text": "b"}', ", line 1: not JSON: Extra data at column 15"),
    ("a.jsonl", b'{\n"text": "a"\n}', ", line 1: not JSON"),
    ("a.jsonl", b'{"text":' + b"[" * 100_000, ", line 1: not JSON: maximum recursion depth"),
    ("a.jsonl", b'"text"', ", line 1: must be a JSON object, got a text"),
    ("a.jsonl", b"null", ", line 1: must be a JSON object, got null"),
    ("a.jsonl", jsonl({"text": "a"}, {"n": 1, "body": "c"}),
     ", line 2: no text_column 'text'; there are: n, body: " + CHOOSE),
    ("a.jsonl", b"{}", ", line 1: no text_column 'text'; there are: none: " + CHOOSE),
    ("a.jsonl", jsonl({"text": "a"}, {"text": 7}), ", line 2: text_column 'text' must hold text, got a number"),
    ("a.jsonl", jsonl({"text": True}), ", line 1: text_column 'text' must hold text, got a boolean"),
    ("a.jsonl", jsonl({"text": ["a"]}), ", line 1: text_column 'text' must hold text, got an array"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', ", line 2: not JSON: 'utf-8' codec can't decode byte 0xff in"),
    ("a.json", b'\n["a",\n"b\xff"]', ": not JSON: 'utf-8' codec can't decode byte 0xff in position 8"),
    ("a.jsonl", rb'{"text": "ab\ud800"}', ", line 1: half a surrogate pair at character 2"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "a", "text": "b"}', ", line 2: 'text' occurs twice in one object"),
    ("a.jsonl", b'{"text": "a", "te\\u0078t": "b"}', ", line 1: 'text' occurs twice in one object"),
    ("a.json", b'[{"text": "a"}, {"body": "b"}]', ", element 2: no text_column 'text'; there are: body: " + CHOOSE),
    ("a.json", b'["a", 7]', ", element 2: text_column 'text' must hold text, got a number"),
    ("a.json", b'["a",\n"b"\n"c"]', ": not JSON: Expecting ',' delimiter: line 3 column 1"),
    ("a.json", b'["a"]\n["b"]\n', ": not JSON: Extra data: line 2 column 1"),
    ("a.json", b'[{"text": "a", "text": "b"}]', ": 'text' occurs twice in one object"),
    ("a.parquet", parquet({"text": ["a"]})[:-9], "Parquet magic bytes not found"),
    ("a.parquet", b"", "Parquet file size is 0 bytes"),
    ("a.parquet", parquet({"body": ["a"], "n": [1]}), ": no text_column 'text'; there are: body, n: " + CHOOSE),
    ("a.parquet", parquet({"text": [1]}), ": text_column 'text' must hold text, got Value('int64')"),
    ("a.parquet", parquet({"text": [["a"]]}), ": text_column 'text' must hold text, got List(Value('string'))"),
    ("a.parquet", parquet({"text": pa.array([b"a", b"\xff"]).view(pa.string())}), "can't decode byte 0xff"),
    ("a.parquet", parquet(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"])),
     ": several columns are called 'text'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "reason"), WRONG)
def test_fault_is_named_with_its_file(folder, name, content, reason):
    path = folder / name
    path.write_bytes(content)

    said = complaint(path)
    assert said.removeprefix("cannot read ").startswith(str(path))
    assert reason in said


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("form", [".txt", ".md", ".jsonl", ".json"])
def test_compressed_files_that_end_early_are_refused_by_name(folder, form, compression):
    noise = random.Random(0).randbytes(50_000).hex()  # hardly compressible, so half of the file still decompresses
    content = {".jsonl": jsonl(*[{"text": noise}] * 3), ".json": json.dumps([noise] * 3).encode()}
    compressed = COMPRESSIONS[compression](content.get(form, noise.encode()))
    path = folder / f"cut{form}{compression}"

    for length in (len(compressed) // 2, len(compressed) - 1, 3):
        path.write_bytes(compressed[:length])
        assert complaint(path).startswith(f"cannot read {path}: ")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize("form", [".txt", ".jsonl", ".parquet"])
def test_file_that_cannot_be_read_is_named(folder, form):
    path = folder / f"unreadable{form}"
    path.symlink_to("/proc/self/mem")  # reading it is an I/O error for root as well

    assert complaint(path).startswith(f"cannot read {path}: ")


def test_one_number_among_many_texts_is_named_and_changes_no_other_text(folder):
    path = folder / "a.jsonl"
    texts = [f"a{number} {'x' * 1000}" for number in range(11_000)]
    path.write_bytes(jsonl(*({"text": text} for text in texts), {"text": 7}, {"text": "end"}))

    rows = read_files(find_files(str(path), "corpus"), "text")
    assert [next(rows)["text"] for _ in texts] == texts
    with pytest.raises(LabError, match=r"line 11001: text_column 'text' must hold text, got a number"):
        next(rows)


def test_why_datasets_does_not_read_text_and_json(folder):
    """It changes texts without a word. Once it does not, it can replace our readers."""

    def documents(kind: str, file: str, content: bytes, **options: str) -> list[str]:
        (folder / file).write_bytes(content)
        found = datasets.load_dataset(kind, data_files=str(folder / file), split="train", streaming=True, **options)
        return [row["text"] for row in found]

    rows = [*({"text": "x" * 1000} for _ in range(11_000)), {"text": 7}, {"text": "end"}]
    assert documents("json", "a.jsonl", jsonl(*rows))[-2:] == ["7", '"end"'], "quotes in the 10 MB with a number"
    cut = zstandard.compress(b"line\n" * 200_000)
    (shorter,) = documents("text", "b.txt.zst", cut[: len(cut) // 2], sample_by="document")
    assert len(shorter) < 1_000_000, "no error for a file that is cut off"
    assert documents("text", "c.txt", b"a\r\nb", sample_by="document") == ["a\nb"], "other line ends"


def test_other_columns_may_hold_the_text(folder):
    (folder / "a.jsonl").write_bytes(jsonl({"naïve": "a"}))
    (folder / "b.parquet").write_bytes(parquet({"naïve": ["b"], "naïve.x": ["c"]}))

    assert read(folder, "naïve") == ["a", "b"]
    assert read(folder / "b.parquet", "naïve.x") == ["c"]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jsonl({"text": text}) if path.suffix == ".jsonl" else text.encode())


def test_folder_is_read_at_every_depth_in_order_of_path_and_other_files_are_left_alone(folder):
    for name in ("z.txt", "a.txt", "sub/m.jsonl", "sub.txt", "sub/deep/n.txt"):
        write(folder / name, name)
    for name in ("README.md", "config.json", "dataset_infos.json", "a.csv", "run.log", "a.parquet.gz"):
        (folder / name).write_text("not data")
    (folder / "folder.txt").mkdir()

    assert read(folder) == ["a.txt", "sub/deep/n.txt", "sub/m.jsonl", "sub.txt", "z.txt"]


def test_glob_takes_what_matches_and_a_name_with_its_signs_the_file_of_that_name(folder):
    for name in ("train-1.txt", "train-0.txt", "valid.txt", "a[1].txt", "a*?.txt"):
        (folder / name).write_text(name)
    (folder / "train-folder").mkdir()

    assert read(folder / "train-*") == ["train-0.txt", "train-1.txt"]
    assert read(folder / "a[1].txt") == ["a[1].txt"]
    assert read(folder / "a*?.txt") == ["a*?.txt"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.txt", "no such file or folder"),
        ("missing-*.txt", "no file matches"),
        ("empty", r"contains no file in a supported format \(.txt, .md, .jsonl, .json, .parquet.*\); hidden files are"),
        ("notes.rst", "is not in a supported format"),
        ("notes.*", "is not in a supported format"),
        ("corpus.txt.bz2", "is not in a supported format"),
        ("corpus.parquet.gz", r"is not in a supported format \(.*each but the last also with .gz, .xz, .zst\)"),
        ("corpus.csv", "is not in a supported format .*; see docs/data.md for tables"),
    ],
)
def test_nothing_to_read_is_refused_naming_the_option(folder, name, reason):
    write(folder / "empty" / ".git" / "a.txt", "a")
    for other in ("notes.rst", "corpus.txt.bz2", "corpus.parquet.gz", "corpus.csv"):
        (folder / other).write_text("a")

    with pytest.raises(LabError, match=reason) as error:
        find_files(str(folder / name), "validation")
    assert str(error.value).startswith("validation: ")


HIDDEN = (
    ".git/a.txt",
    ".ipynb_checkpoints/a.jsonl",
    "sub/._a.jsonl",
    "sub/.a.txt",
    "__pycache__/a.txt",
    ".hidden/b/a.txt",
)


def test_hidden_names_below_a_folder_are_left_out(folder):
    """The same names are left out as by datasets, which reads files, though not folders, that begin with "__"."""
    for name in (*HIDDEN, ".~lock.a.txt#", "sub/a.txt", "__a.txt", "sub/b.jsonl"):
        write(folder / name, name)
    (folder / ".#a.txt").symlink_to("user@host.1")  # a lock file of Emacs

    assert read(folder) == ["__a.txt", "sub/a.txt", "sub/b.jsonl"]
    assert read(folder / "**" / "*.txt") == ["__a.txt", "sub/a.txt"]
    found = datasets.load_dataset("text", data_dir=str(folder), split="train", sample_by="document")
    assert sorted(found["text"])[:2] == ["__a.txt", "sub/a.txt"]


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_names_that_the_user_gives_are_read(folder, name):
    write(folder / name, name)
    hidden, *below = name.split("/")
    hidden = name if hidden == "sub" else hidden

    assert read(folder / name) == read(folder / hidden) == [name]
    assert read(folder / f"{hidden[:-1]}*" / Path(*below) if hidden != name else folder / f"{name[:-3]}*") == [name]


def no_files(folder: Path) -> None:
    """Create one of each kind of path that is neither a folder nor a regular file."""
    (folder / "gone.jsonl").symlink_to("nowhere.jsonl")
    (folder / "gone").symlink_to("/nowhere/at/all")
    (folder / "itself.txt").symlink_to("itself.txt")
    os.mkfifo(folder / "fifo.txt")
    (folder / "device.txt").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as opened:
        here = Path.cwd()
        os.chdir(folder)  # the path of a socket has at most 107 bytes
        opened.bind("a.sock")
        os.chdir(here)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gone.jsonl", "links to nowhere.jsonl, which does not exist"),
        ("gone", "links to /nowhere/at/all, which does not exist"),
        ("itself.txt", "links to itself.txt, which does not exist"),
        ("fifo.txt", "is not a regular file"),
        ("device.txt", "is not a regular file"),
        ("a.sock", "is not a regular file"),
    ],
)
def test_what_is_no_regular_file_is_refused_by_name(folder, tmp_path, name, what):
    write(folder / "sub" / "a.txt", "a")
    (tmp_path / "kinds").mkdir()
    no_files(tmp_path / "kinds")
    moved = (tmp_path / "kinds" / name).rename(folder / "sub" / name)

    for pattern in (folder, moved, folder / "sub" / f"{name[:-1]}?"):
        with pytest.raises(LabError) as error:
            find_files(str(pattern), "validation")
        assert str(error.value).startswith(f"validation: {moved} {what}")


def test_linked_folders_are_read_once(folder, tmp_path):
    write(tmp_path / "elsewhere" / "a.txt", "a")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert read(folder) == ["a"]

    (folder / "link2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LabError, match=r"corpus: .*link2 is the same folder as .*link: its texts would be read twice"):
        read(folder)
    (folder / "link2").unlink()
    (folder / "round").symlink_to(folder)
    with pytest.raises(LabError, match=r"corpus: .*round is the same folder as"):
        read(folder)


def test_folder_that_cannot_be_read_is_named(folder, monkeypatch):
    write(folder / "sub" / "a.txt", "a")
    scandir = os.scandir

    def denied(path: str) -> object:
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(LabError, match=r"corpus: cannot read the folder .*sub: Permission denied"):
        find_files(str(folder), "corpus")
