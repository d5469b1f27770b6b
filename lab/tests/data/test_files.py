from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import shlex
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


def parquet(rows: dict) -> bytes:
    return parquet_of(pa.table(rows))


def parquet_of(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def jsonl(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(path: Path, column: str = "text") -> list[str]:
    return [row["text"] for row in read_files(find_files(str(path), "corpus"), column)]


def complaint(path: Path, column: str = "text") -> str:
    with pytest.raises(LabError) as error:
        read(path, column)
    return str(error.value)


CONTENTS = {
    ".txt": (TEXT.encode(), [TEXT]),
    ".jsonl": (jsonl({"text": TEXT, "n": 1}, {"n": "x", "text": "b"}, {"text": None}), [TEXT, "b", ""]),
    ".md": (TEXT.encode(), [TEXT]),
    ".json": (json.dumps([{"text": TEXT}, "b", {"n": 1, "text": None}, None], indent=1).encode(), [TEXT, "b", "", ""]),
    ".parquet": (parquet({"n": [1, 2, 3], "text": [TEXT, "b", None]}), [TEXT, "b", ""]),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("form", CONTENTS)
def test_text_comes_back_as_it_was(folder, form, compression):
    content, documents = CONTENTS[form]
    path = folder / f"corpus{form}{compression}"
    path.write_bytes(COMPRESSIONS[compression](content))

    assert read(path) == documents


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("form", CONTENTS)
def test_compressed_files_that_end_early_are_refused_by_name(folder, form, compression):
    noise = random.Random(0).randbytes(50_000).hex()  # hardly compressible, so half of the file still decompresses
    content = {".txt": noise.encode(), ".jsonl": jsonl(*[{"text": noise}] * 3), ".parquet": parquet({"text": [noise]})}
    content |= {".md": noise.encode(), ".json": json.dumps([noise] * 3).encode()}
    compressed = COMPRESSIONS[compression](content[form])
    path = folder / f"cut{form}{compression}"

    for length in (len(compressed) // 2, len(compressed) - 1, 3):
        path.write_bytes(compressed[:length])
        assert str(path) in complaint(path)


@pytest.mark.parametrize("name", ["plain.txt.gz", "plain.txt.xz", "plain.txt.zst", "plain.parquet"])
def test_files_that_are_not_what_their_name_says_are_refused_by_name(folder, name):
    path = folder / name
    path.write_bytes(b"plain text, not compressed at all" if "txt" in name else parquet({"text": ["a"]})[:-9])

    assert str(path) in complaint(path)


def test_zstandard_frames_in_a_row_are_all_read(folder):
    path = folder / "frames.txt.zst"
    path.write_bytes(zstandard.compress(b"one ") + zstandard.compress(b"two"))

    assert read(path) == ["one two"]


def test_a_byte_order_mark_blank_lines_and_the_end_of_the_last_line_are_no_text(folder):
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    (folder / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl({"text": "\ufeffkept"}) + b'\n  \n{"text": "b"}')

    assert read(folder) == ["text", "\ufeffkept", "b"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize("form", CONTENTS)
def test_file_that_cannot_be_read_is_named(folder, form):
    path = folder / f"unreadable{form}"
    path.symlink_to("/proc/self/mem")  # reading it is an I/O error for root as well

    assert complaint(path).startswith("cannot read")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": oops}', "not JSON: Expecting value at column 10"),
        (b'{"text": "a"', "not JSON"),
        (b'"text"', "must be a JSON object, got str"),
        (
            b'{"title": "a", "body": "b"}',
            "no text_column 'text'; there are: title, body: choose the one with the text by --data.text-column NAME",
        ),
        (b"{}", "no text_column 'text'; there are: none"),
        (b'{"text": 7}', "text_column 'text' must hold text, got int"),
        (b'{"text": ["a"]}', "text_column 'text' must hold text, got list"),
        (b'{"text": "\xff"}', "not UTF-8: byte 10 of the line"),
        (rb'{"text": "ab\ud800"}', "half a surrogate pair at character 2"),
        (b'{"text":' + b"[" * 100_000, "JSON nested too deeply"),
    ],
)
def test_malformed_line_is_named_by_file_and_number(folder, line, reason):
    path = folder / "bad.jsonl"
    path.write_bytes(jsonl({"text": "a"}, {"text": "b"}) + line + b"\n" + jsonl({"text": "c"}))

    assert complaint(path).startswith(f"{path}, line 3: {reason}")


def test_txt_that_is_not_utf8_is_named_with_the_byte(folder):
    path = folder / "latin.txt"
    path.write_bytes("naïve".encode() + b" caf\xe9 ")

    assert complaint(path).startswith(f"{path}: not UTF-8: byte 10 is 0xe9")


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("body", "no text_column 'body'; there are: text, n: choose the one with the text by --data.text-column NAME"),
        ("n", "text_column 'n' must hold text, got int64"),
    ],
)
def test_wrong_column_of_parquet_is_refused(folder, column, reason):
    path = folder / "a.parquet"
    path.write_bytes(parquet({"text": ["a"], "n": [1]}))

    assert complaint(path, column).startswith(f"{path}: {reason}")


TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
]


@pytest.mark.parametrize("compression", ["", ".zst"])
@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_columns_of_every_type_of_text_are_read(folder, kind, compression):
    texts = ["a", None, TEXT, "a", ""] * 700  # more than one batch
    path = folder / f"a.parquet{compression}"
    path.write_bytes(COMPRESSIONS[compression](parquet({"n": range(3500), "body": pa.array(texts).cast(kind)})))

    assert read(path, "body") == ["a", "", TEXT, "a", ""] * 700


def test_column_of_nulls_alone_holds_empty_texts_in_every_format(folder):
    (folder / "a.jsonl").write_bytes(jsonl({"text": None}, {"text": None}))
    (folder / "b.parquet").write_bytes(parquet({"text": pa.nulls(2)}))
    (folder / "c.parquet").write_bytes(parquet({"text": ["c"]}))

    assert read(folder) == ["", "", "", "", "c"]


@pytest.mark.parametrize("kind", [pa.list_(pa.string_view()), pa.large_list(pa.string_view()), pa.list_(pa.string())])
def test_lists_of_texts_are_no_text_and_no_obstacle(folder, kind):
    path = folder / "a.parquet"
    path.write_bytes(parquet({"lines": pa.array([["a"], None], kind), "text": ["b", "c"]}))

    assert complaint(path, "lines").startswith(
        f"{path}: text_column 'lines' must hold text, got {str(kind).split('<')[0]}<"
    )
    assert read(path) == ["b", "c"]


@pytest.mark.parametrize("names", [["text", "text", "n"], ["text", "n", "text"], ["n", "text", "text"]])
def test_column_that_stands_twice_is_refused(folder, names):
    path = folder / "a.parquet"
    path.write_bytes(parquet_of(pa.Table.from_arrays([pa.array(["a"])] * 3, names=names)))

    assert complaint(path) == f"{path}: 2 columns are called 'text': rename all but one"
    assert read(path, "n") == ["a"]


def test_field_of_a_struct_is_not_taken_for_the_column_of_its_path(folder):
    path = folder / "a.parquet"
    path.write_bytes(parquet({"text": [{"a": "inner"}], "text.a": ["outer"]}))

    assert read(path, "text.a") == ["outer"]


@pytest.mark.parametrize("column", ["text", "naïve"])
@pytest.mark.parametrize("escape", [False, True])
def test_key_that_stands_twice_is_refused_in_jsonl(folder, column, escape):
    path = folder / "a.jsonl"
    key = json.dumps(column, ensure_ascii=escape)
    line = f'{{"n": {{{key}: 1}}, {key}: "a", "m": {key}, "n": {key}}}\n'  # other keys and values are left alone
    path.write_text(line + line.replace('"m"', key), encoding="utf-8")
    files = find_files(str(path), "corpus")

    assert next(read_files(files, column)) == {"text": "a"}
    assert complaint(path, column) == f"{path}, line 2: {column!r} occurs twice in one object: rename one of them"


def test_parquet_that_is_not_utf8_is_named(folder):
    path = folder / "a.parquet"
    path.write_bytes(parquet({"text": pa.array([b"a", b"\xff"]).view(pa.string())}))

    assert complaint(path).startswith(f"{path}: text_column 'text' holds text that is not UTF-8")


def test_folder_is_read_at_every_depth_in_order_of_path_and_other_files_are_left_alone(folder):
    (folder / "sub").mkdir()
    (folder / "z.txt").write_text("z")
    (folder / "a.txt").write_text("a")
    (folder / "sub" / "m.jsonl").write_bytes(jsonl({"text": "m"}))
    for name in ("README.md", "config.json", "dataset_infos.json", "a.csv", "run.log"):
        (folder / name).write_text("not data")
    (folder / "folder.txt").mkdir()

    assert read(folder) == ["a", "m", "z"]


def test_glob_takes_what_matches_and_a_name_with_its_signs_the_file_of_that_name(folder):
    for name in ("train-1.txt", "train-0.txt", "valid.txt", "a[1].txt"):
        (folder / name).write_text(name)
    (folder / "train-folder").mkdir()

    assert read(folder / "train-*") == ["train-0.txt", "train-1.txt"]
    assert read(folder / "a[1].txt") == ["a[1].txt"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.txt", "no such file or folder"),
        ("missing-*.txt", "no file matches"),
        (
            "empty",
            r"contains no file in a supported format \(.txt, .md, .jsonl, .json, .parquet.*\); hidden files are",
        ),
        ("notes.rst", "is not in a supported format"),
        ("notes.*", "is not in a supported format"),
        ("corpus.txt.bz2", "is not in a supported format"),
    ],
)
def test_nothing_to_read_is_refused_naming_the_option(folder, name, reason):
    write(folder / "empty" / ".git" / "a.txt", "a")
    (folder / "notes.rst").write_text("a")
    (folder / "corpus.txt.bz2").write_text("a")

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


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jsonl({"text": text}) if path.suffix == ".jsonl" else text.encode())


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


def no_files(folder: Path) -> dict[str, Path]:
    """Create one of each kind of path that is neither a folder nor a regular file, and return them by name."""
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
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["gone.jsonl", "gone", "itself.txt", "fifo.txt", "device.txt", "a.sock"])
def test_what_is_no_regular_file_is_refused_by_name(folder, tmp_path, name):
    write(folder / "sub" / "a.txt", "a")
    (tmp_path / "kinds").mkdir()
    path = no_files(tmp_path / "kinds")[name]
    moved = path.rename(folder / "sub" / name)
    what = {"gone.jsonl": "links to nowhere.jsonl, which", "gone": "links to /nowhere/at/all, which does not exist"}
    what["itself.txt"] = "links to itself.txt, which does not exist"

    for pattern in (folder, moved, folder / "sub" / f"{name[:-1]}?"):
        with pytest.raises(LabError) as error:
            find_files(str(pattern), "validation")
        assert str(error.value).startswith(f"validation: {moved} {what.get(name, 'is not a regular file')}")


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
    (folder / "sub").mkdir()
    listed = Path.iterdir

    def iterdir(path: Path):
        if path.name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(LabError, match=r"corpus: cannot read the folder .*sub: Permission denied"):
        find_files(str(folder), "corpus")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.json.xz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_may_hold_an_array_an_object_or_an_object_a_line(folder, name, indent):
    path = folder / name

    def read_back(*contents: object) -> list[str]:
        content = b"".join(json.dumps(content, indent=indent).encode() + b"\n" for content in contents)
        path.write_bytes(COMPRESSIONS[path.suffix if path.suffix in COMPRESSIONS else ""](b"\n" + content))
        return read(path)

    assert read_back([{"text": TEXT, "n": [1]}, {"text": "b"}]) == [TEXT, "b"]
    assert read_back(["a", TEXT, None]) == ["a", TEXT, ""]
    assert read_back({"n": {"text": 1}, "text": TEXT}) == [TEXT]
    assert read_back([]) == []
    if indent is None:
        assert read_back({"text": "a"}, {"text": "b"}) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'[{"text": "a"}, {"body": "b"}]', ", element 2: no text_column 'text'; there are: body: choose the one"),
        (b'["a", 7]', ", element 2: text_column 'text' must hold text, got int"),
        (b'[["a"]]', ", element 1: text_column 'text' must hold text, got list"),
        (b'["a",\n"b"\n"c"]', ", line 3: not JSON: Expecting ',' delimiter at column 1"),
        (b'\n["a",\n"b\xff"]', ", line 3: not UTF-8: byte 2 of the line"),
        (b'["a"]\n["b"]\n', ", line 2: a second JSON value: must be one object per line, or one array"),
        (b'{\n"text": "a"\n}\n{\n"text": "b"\n}\n', ", line 4: a second JSON value: must be one object per line"),
        (b'["a", "b', ", line 1: not JSON: Unterminated string"),
        (rb'["a", "\ud800"]', ", element 2: half a surrogate pair at character 0"),
        (b'[{"text": "a", "text": "b"}]', ": 'text' occurs twice in one object"),
        (b"[" * 100_000, ": JSON nested too deeply"),
        (b'{"data": [{"text": "a"}]}', ", line 1: no text_column 'text'; there are: data"),
        (b'{"text": ["a", "b"]}', ", line 1: text_column 'text' must hold text, got list"),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_fault_in_an_array_is_named_by_file_and_element_or_line(folder, suffix, content, reason):
    path = folder / f"a{suffix}"
    path.write_bytes(content)

    assert complaint(path).startswith(f"{path}{reason}")


def run_command(message: str) -> None:
    """Run the `python -c "..."` at the end of a message, as a shell would."""
    python, flag, code = shlex.split(message[message.index("python -c ") :])
    assert (python, flag) == ("python", "-c")
    exec(code, {})


@pytest.mark.parametrize("name", ["my web.csv", "web.tsv", "it's.csv", "web.csv.gz"])
def test_command_that_converts_tables_gives_their_texts(folder, name):
    path = folder / "sub" / name
    path.parent.mkdir()
    separator = "\t" if "tsv" in name else ","
    rows = separator.join(["n", "text"]) + "\n" + separator.join(["1", '"a ""b"", c\nd"']) + "\n"
    path.write_bytes(COMPRESSIONS[path.suffix if path.suffix in COMPRESSIONS else ""](rows.encode()))
    messages = []
    for pattern in (path, folder):
        with pytest.raises(LabError, match="format") as error:
            find_files(str(pattern), "corpus")
        messages.append(str(error.value))
    assert "python -c" in messages[0]
    assert messages[1].endswith(messages[0][messages[0].index("; to convert") :])

    run_command(messages[0])
    (made,) = path.parent.glob("*.jsonl")
    assert read(made) == ['a "b", c\nd']


CHAT = [{"role": "user", "content": "2 + 2?\nQuick."}, {"role": "assistant", "content": "4"}]
SHARED_CHAT = [{"from": "human", "value": turn["content"]} for turn in CHAT]


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(("column", "chat"), [("messages", CHAT), ("conversations", SHARED_CHAT)])
def test_command_that_converts_chats_gives_their_texts(folder, form, column, chat):
    path = folder / f"my chats.{form}"
    rows = [{column: chat, "id": 1}, {column: chat[:1], "id": 2}]
    contents = {
        "jsonl": jsonl(*rows),
        "json": json.dumps(rows).encode(),
        "parquet": parquet_of(pa.Table.from_pylist(rows)),
    }
    path.write_bytes(contents[form])

    assert "no text_column 'text'; there are: " in complaint(path)
    assert f"text_column '{column}' must hold text, got list" in complaint(path, column)
    run_command(complaint(path))
    assert read(folder / "my chats-text.jsonl") == ["2 + 2?\nQuick.\n\n4", "2 + 2?\nQuick."]
    (folder / "my chats-text.jsonl").unlink()
    run_command(complaint(path, column))
    assert (folder / "my chats-text.jsonl").exists()


@pytest.mark.parametrize("form", CONTENTS)
@pytest.mark.parametrize("window_log", [28, 31])
def test_frame_of_zstd_long_is_refused_with_the_command_that_unpacks_it(folder, form, window_log):
    path = folder / f"long one{form}.zst"
    # The magic number, a frame without a size, its window of 2^window_log bytes, and one empty last block.
    path.write_bytes(bytes.fromhex("28b52ffd") + bytes([0, (window_log - 10) << 3]) + bytes([1, 0, 0]))

    said = complaint(path)
    assert said.startswith(f"cannot read {path}: ")
    assert f"unpack it with: zstd -d --long=31 '{path}'" in said
