"""The sources of documents, and which documents are held out."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvshift_lab.core.errors import LabError
from kvshift_lab.data import sources
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.files import bundled_corpora
from kvshift_lab.data.sources import load_documents


def column(documents: datasets.Dataset | datasets.IterableDataset) -> list[str]:
    assert documents.column_names == ["text"]
    return [row["text"] for row in documents]


def load_all(**options: Any) -> list[str]:
    train, validation = load(**options)
    return train + validation


def load(**options: Any) -> tuple[list[str], list[str]]:
    train, validation = load_documents(DataConfig(**options))
    assert isinstance(validation, datasets.Dataset)
    assert isinstance(train, datasets.IterableDataset if options.get("streaming") else datasets.Dataset)
    return column(train), column(validation)


def write_lines(path: Path, texts: list[str], name: str = "text") -> str:
    path.write_text("".join(json.dumps({name: text, "id": 3}) + "\n" for text in texts))
    return str(path)


NAMES = [f"document {number}" for number in range(23)]


def test_bundled_corpus_is_the_known_text():
    (train,), (validation,) = load()

    assert bundled_corpora() == ["tinyshakespeare"]
    digest = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    assert hashlib.sha256((train + validation).encode()).hexdigest() == digest
    assert len(validation) / len(train + validation) == pytest.approx(0.1, abs=1e-3)
    assert train.endswith("\n")


def test_last_documents_are_held_out_where_there_are_many(folder):
    corpus = write_lines(folder / "a.jsonl", NAMES)

    assert load(corpus=corpus) == (NAMES[:-2], NAMES[-2:])
    assert load(corpus=corpus, validation_fraction=0.3) == (NAMES[:-6], NAMES[-6:])
    assert load(corpus=corpus, validation_fraction=0.99) == (NAMES[:1], NAMES[1:])


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.24])
@pytest.mark.parametrize(
    "texts",
    [["ab\ncd\n" * 40], ["x" * 100], ["a\n" * 9, "", "b" * 50], ["one\n", "two\n", "three\n", "four"], ["a", ""]],
)
def test_last_characters_are_held_out_where_the_documents_are_few(folder, texts, fraction):
    """The text is split into training and validation at one place; nothing is lost, and nothing is in both."""
    train, validation = load(corpus=write_lines(folder / "a.jsonl", texts), validation_fraction=fraction)
    whole, before = "".join(texts), "".join(train)

    assert [head + tail for head, tail in zip(train, validation, strict=True)] == texts
    assert before + "".join(validation) == whole
    wanted = int(len(whole) * (1 - fraction))
    assert len(before) == wanted or (wanted < len(before) < len(whole) and before.endswith("\n"))


def test_cut_is_at_the_start_of_a_line(folder):
    (folder / "a.txt").write_text("0123456789\n" * 10)

    assert load(corpus=str(folder), validation_fraction=0.25) == (["0123456789\n" * 8], ["0123456789\n" * 2])


def test_a_cut_in_the_last_line_is_where_it_was_asked_for(folder):
    (folder / "a.txt").write_text("word " * 20 + "\n")

    train, validation = load(corpus=str(folder), validation_fraction=0.1)
    assert [*map(len, train), *map(len, validation)] == [90, 11]


def test_a_cut_in_the_last_line_of_a_document_is_moved_behind_it(folder):
    for name, words in (("a", 60), ("b", 2)):
        (folder / f"{name}.txt").write_text("word " * words + "\n")

    train, validation = load(corpus=str(folder), validation_fraction=0.1)
    assert [*map(len, train)] == [301, 0]
    assert [*map(len, validation)] == [0, 11]


@pytest.mark.parametrize("streaming", [False, True])
def test_validation_may_be_files_of_its_own(folder, streaming):
    train = write_lines(folder / "train.jsonl", NAMES[:20])
    validation = write_lines(folder / "valid.jsonl", NAMES[20:])

    assert load(corpus=train, validation=validation, streaming=streaming) == (NAMES[:20], NAMES[20:])


@pytest.mark.parametrize("as_link", [False, True])
def test_file_for_both_training_and_validation_is_refused(folder, as_link):
    write_lines(folder / "a.jsonl", NAMES)
    write_lines(folder / "b.jsonl", NAMES)
    valid = folder / "b.jsonl"
    if as_link:
        valid = folder.parent / "link.jsonl"
        valid.symlink_to(folder / "b.jsonl")

    with pytest.raises(LabError, match=r"validation: .*b\.jsonl is also in corpus"):
        load(corpus=str(folder), validation=str(valid))


def test_link_to_a_file_without_suffix_is_read_by_its_own_name(folder):
    (folder / "blob").write_text("text\n" * 10)
    (folder / "a.txt").symlink_to(folder / "blob")

    assert "".join(load_all(corpus=str(folder / "a.txt"))) == "text\n" * 10


def test_stream_reads_no_more_than_it_has_to(folder, monkeypatch):
    """The fault in line 21 is only reported when the stream reaches it."""
    monkeypatch.setattr(sources, "STREAM_VALIDATION_DOCUMENTS", 5)
    path = folder / "a.jsonl"
    write_lines(path, NAMES[:20])
    path.write_text(path.read_text() + "{\n")
    train, _ = load_documents(DataConfig(corpus=str(path), streaming=True))
    rows = iter(train)

    assert [next(rows)["text"] for _ in range(15)] == NAMES[5:20]
    with pytest.raises(LabError, match="line 21"):
        next(rows)


def test_changed_file_is_read_anew(folder):
    """A changed file of any size is recognized by its modification time."""
    path = folder / "a.txt"
    for content, time in (("a\n" * 20, 1_000_000_000), ("b\n" * 20, 1_000_000_001), ("b\n" * 21, 1_000_000_001)):
        path.write_text(content)
        os.utime(path, (time, time))
        assert "".join(load_all(corpus=str(path))) == content


def test_unchanged_file_comes_from_the_cache(folder, monkeypatch):
    corpus = write_lines(folder / "a.jsonl", NAMES)
    first = load(corpus=corpus)
    monkeypatch.setattr(sources, "read_files", lambda files, column: pytest.fail("read again"))

    assert load(corpus=corpus) == first


def test_other_column_of_the_same_file_is_not_taken_from_the_cache(folder):
    path = folder / "a.jsonl"
    path.write_text('{"a": "first", "b": "second"}\n' * 4)

    assert set(load_all(corpus=str(path), text_column="a", validation_fraction=0.5)) == {"first"}
    assert set(load_all(corpus=str(path), text_column="b", validation_fraction=0.5)) == {"second"}


def test_fault_of_a_file_keeps_its_message_through_the_cache(folder):
    (folder / "a.jsonl").write_text('{"text": "a"}\n{')

    for _ in range(2):  # the second attempt finds nothing half-read
        with pytest.raises(LabError, match=r"a\.jsonl, line 2: not JSON"):
            load(corpus=str(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": "tinyshakespear"}, r"did you mean tinyshakespeare\?"),
        ({"corpus": "nothing like it"}, r"neither a bundled corpus \(tinyshakespeare\), nor a file or folder"),
        ({"corpus": "missing/data.jsonl"}, "nor a file or folder that exists"),
        ({"corpus": "a/b/c"}, "nor a hub dataset"),
        ({"corpus": "missing-*.txt"}, "no file matches: missing-"),
        ({"hub_config": "sample-10BT"}, "hub_config is only for hub datasets, got 'sample-10BT' with corpus tiny"),
        ({"split": "test"}, "split is only for hub datasets, got 'test'"),
        ({"validation": "missing.txt"}, "validation: no such file or folder"),
    ],
)
def test_corpus_that_is_not_there_is_refused(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LabError, match=message):
        load_documents(DataConfig(**options))


def test_bundled_name_wins_over_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tinyshakespeare").mkdir()

    assert load()[0][0].startswith("First Citizen")


class Hub:
    """Replaces the hub: `load_dataset("owner/name")` reads a local folder in the layout of a hub repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple] = []
        self.load = datasets.load_dataset

    def load_dataset(self, path: str, name: str | None, *, split: str, streaming: bool) -> Any:
        self.calls.append((path, name, split, streaming))
        return self.load(str(self.folder), split=split, streaming=streaming)


@pytest.fixture
def hub(folder, monkeypatch) -> Hub:
    write_lines(folder / "train.jsonl", NAMES)
    write_lines(folder / "validation.jsonl", ["v0", "v1"])
    hub = Hub(folder)
    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    return hub


@pytest.mark.parametrize(("streaming", "expected"), [(False, (NAMES[:-2], NAMES[-2:])), (True, (NAMES[5:], NAMES[:5]))])
@pytest.mark.parametrize("name", [None, "sample-10BT"])
def test_hub_dataset_holds_out_its_last_documents_and_a_stream_its_first(hub, monkeypatch, streaming, expected, name):
    monkeypatch.setattr(sources, "STREAM_VALIDATION_DOCUMENTS", 5)

    assert load(corpus="owner/name", hub_config=name, streaming=streaming) == expected
    assert hub.calls == [("owner/name", name, "train", streaming)]


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_split_for_validation(hub, streaming):
    options = {"corpus": "owner/name", "split": "train", "validation": "validation", "streaming": streaming}

    assert load(**options) == (NAMES, ["v0", "v1"])
    assert hub.calls == [("owner/name", None, split, streaming) for split in ("train", "validation")]


def test_parts_of_a_hub_split_may_train_and_validate(hub):
    options = {"corpus": "owner/name", "split": "train[:20]", "validation": "train[20:]"}

    assert load(**options) == (NAMES[:20], NAMES[20:])


OVERLAPS = (
    ("train[:90%]", "train"),
    ("train[:90%]", "train[80%:]"),
    ("train[:20]", "train[10%:]"),
    ("train[-5:]", "train[:5]"),
    ("train+test", "test"),
    ("all", "train"),
    ("train", "all"),
)


@pytest.mark.parametrize(("split", "validation"), OVERLAPS)
def test_parts_of_hub_splits_that_may_overlap_are_refused(hub, split, validation):
    with pytest.raises(LabError, match=r"is also trained on .*, or may be"):
        load(corpus="owner/name", split=split, validation=validation)


@pytest.mark.parametrize(
    ("one", "other"), [("train", "test"), ("train[:90%]", "train[90%:]"), ("a[5:9]+b", "a[9:]+a[:5]+c")]
)
def test_splits_that_do_not_overlap(one, other):
    assert not sources._may_overlap(one, other)
    assert not sources._may_overlap(other, one)


@pytest.mark.parametrize("validation", ["train", "train[:3]"])
def test_split_for_both_training_and_validation_is_refused(hub, validation):
    with pytest.raises(LabError, match=r"the split train.* is also trained on \(split train\)"):
        load(corpus="owner/name", validation=validation)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "body"}, "owner/name, split train: no text_column 'body'; there are: text, id"),
        ({"text_column": "id"}, r"owner/name, split train: text_column 'id' must hold text, got Value"),
        ({"split": "test"}, "'owner/name' is not a file or folder here, and loading it from the hub failed: .*test"),
        ({"validation": "test"}, "loading it from the hub failed: .*test"),
    ],
)
def test_fault_of_a_hub_dataset_is_named(hub, options, message, streaming):
    with pytest.raises(LabError, match=message):
        load(corpus="owner/name", streaming=streaming, **options)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-1.jsonl", b'{"text": "a", "id": 3}\n{"text": oops}\n'),
        ("train-1.jsonl", b'{"text": "a", "text": "b", "id": 3}\n'),
        ("train-1.jsonl", b'{"text": "\xff", "id": 3}\n'),
        ("train-1.jsonl.gz", gzip.compress(b'{"text": "a", "id": 3}\n' * 99, mtime=0)[:-9]),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_damaged_file_of_a_hub_dataset_is_an_error(hub, monkeypatch, streaming, name, content):
    monkeypatch.setattr(sources, "STREAM_VALIDATION_DOCUMENTS", 5)
    (hub.folder / "train.jsonl").rename(hub.folder / "train-0.jsonl")
    (hub.folder / name).write_bytes(content)

    def read() -> list[list[str]]:
        config = DataConfig(corpus="owner/name", streaming=streaming)
        return [list(sources.texts(part)) for part in load_documents(config)]

    with pytest.raises(LabError, match=r"(cannot be read to its end|from the hub failed): (?!An error occurred)"):
        read()


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset_with_another_column(hub, streaming, monkeypatch):
    monkeypatch.setattr(sources, "STREAM_VALIDATION_DOCUMENTS", 2)
    write_lines(hub.folder / "train.jsonl", NAMES, name="body")
    write_lines(hub.folder / "validation.jsonl", NAMES[:3], name="body")

    assert sorted(load_all(corpus="owner/name", streaming=streaming, text_column="body")) == sorted(NAMES)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.null()], ids=str)
def test_hub_dataset_with_every_type_of_text(hub, kind, streaming, monkeypatch):
    monkeypatch.setattr(sources, "STREAM_VALIDATION_DOCUMENTS", 2)
    for path in hub.folder.iterdir():
        path.unlink()
    texts = [None] * 20 if kind == pa.null() else [None, *NAMES]
    pq.write_table(pa.table({"text": pa.array(texts, kind)}), hub.folder / "train.parquet")

    train, validation = load_documents(DataConfig(corpus="owner/name", streaming=streaming))
    assert sorted([*sources.texts(train), *sources.texts(validation)]) == sorted(filter(None, texts))


def test_path_that_exists_is_no_hub_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", None)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write_lines(tmp_path / "owner" / "name" / "a.jsonl", NAMES)

    assert load(corpus="owner/name") == (NAMES[:-2], NAMES[-2:])
