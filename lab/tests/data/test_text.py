"""From a configuration to sequences: all parts together, their messages, and reproducible sequences."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

from kvshift_lab.core.errors import LabError
from kvshift_lab.data import dataset_cache, files, packing, sources
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.packing import collate
from kvshift_lab.data.text import TextData, load_text_data


def load(tmp_path: Path, *, seed: int = 0, **options: Any) -> TextData:
    return load_text_data(DataConfig(**options), seed=seed, tokenizer_folder=tmp_path / "tokenizer")


def write_documents(path: Path, count: int, words: int = 20) -> str:
    """Write documents that have no words in common, and return their path."""
    lines = [{"text": " ".join(f"w{number}x{word}" for word in range(words))} for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def tokens(rows: datasets.Dataset | datasets.IterableDataset) -> list[list[int]]:
    return [torch.as_tensor(row["input_ids"]).tolist() for row in rows]


def test_bundled_corpus_becomes_sequences(tmp_path):
    data = load(tmp_path)

    assert isinstance(data.train, datasets.Dataset)
    assert len(data.tokenizer) == 1024
    assert (len(data.train), len(data.validation)) == (1606, 193)
    assert data.train.column_names == data.validation.column_names == ["input_ids"]
    assert data.train[0]["input_ids"].shape == (256,)
    assert data.tokenizer.decode(data.train[0]["input_ids"]).startswith("First Citizen:\nBefore we proceed")
    whole = data.tokenizer.decode(
        [token for part in (data.train, data.validation) for row in tokens(part) for token in row]
    )
    corpus = (files._corpora() / "tinyshakespeare.txt").read_text()
    assert len(corpus) - len(whole) < 2 * 256 * 8  # all text except two tails
    assert whole[:900_000] == corpus[:900_000]


def test_bpe_is_trained_on_the_training_text_alone(tmp_path, folder):
    (folder / "a.txt").write_text("train " * 90 + "held " * 10)
    (folder / "b.txt").write_text("held " * 99)
    data = load(tmp_path, corpus=str(folder / "a.txt"), vocab_size=280, sequence_length=2)
    vocabulary = set(data.tokenizer.get_vocab())

    assert any("rain" in token for token in vocabulary)
    assert not any("eld" in token for token in vocabulary)


def test_stream_holds_all_sequences_in_an_order_of_the_seed(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(sources, "STREAM_VALIDATION_DOCUMENTS", 3)
    corpus = write_documents(folder / "a.jsonl", 31)
    options = {"corpus": corpus, "vocab_size": 300, "sequence_length": 32}
    data = load(tmp_path / "a", streaming=True, **options)
    rows = tokens(data.train)
    assert tokens(data.train) == tokens(load(tmp_path / "b", streaming=True, **options).train) == rows
    other = tokens(load(tmp_path / "c", streaming=True, seed=1, **options).train)
    monkeypatch.setattr(packing, "_SHUFFLE_ROWS", 1)
    in_order = tokens(load(tmp_path / "d", streaming=True, **options).train)

    assert isinstance(data.train, datasets.IterableDataset)
    assert isinstance(data.validation, datasets.Dataset)
    assert len(rows) > 20
    assert rows != other != in_order != rows
    assert sorted(rows) == sorted(other) == sorted(in_order)
    assert data.tokenizer.decode(data.validation[0]["input_ids"]).startswith("w0x0 w0x1")
    assert data.tokenizer.decode(in_order[0]).startswith("w3x0 w3x1")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("streaming", [False, True])
def test_number_of_workers_changes_nothing(tmp_path, folder, monkeypatch, streaming):
    monkeypatch.setattr(sources, "STREAM_VALIDATION_DOCUMENTS", 3)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # otherwise, tokenizers warns about the fork
    corpus = write_documents(folder / "a.jsonl", 31)
    data = load(tmp_path, corpus=corpus, vocab_size=300, sequence_length=32, streaming=streaming, packing="documents")
    epochs = []
    for workers in (0, 1, 2):
        loader = DataLoader(data.train, batch_size=3, num_workers=workers, collate_fn=collate)
        epochs.append(list(loader))

    assert len(epochs[0]) > 7
    for epoch in epochs[1:]:
        assert len(epoch) == len(epochs[0])
        for batch, expected in zip(epoch, epochs[0], strict=True):
            assert all(torch.equal(batch[name], expected[name]) for name in ("input_ids", "position_ids", "labels"))


DIGEST = """
import hashlib, sys
from pathlib import Path
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.text import load_text_data

config = DataConfig(corpus=sys.argv[1], vocab_size=300, sequence_length=32, packing="documents")
data = load_text_data(config, seed=0, tokenizer_folder=Path(sys.argv[2]))
rows = [[row[name].tolist() for name in row] for part in (data.train, data.validation) for row in part]
print(len(rows), hashlib.sha256(repr(rows).encode()).hexdigest())
"""


@pytest.mark.slow
def test_processes_that_start_together_get_the_same_sequences(tmp_path, folder, cache):
    """Both processes use the same cache and the same tokenizer folder, which are empty at first."""
    corpus = write_documents(folder / "a.jsonl", 200)
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "common"), "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-c", DIGEST, corpus, str(tmp_path / "tokenizer")]
    processes = [subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]

    data = load_text_data(
        DataConfig(corpus=corpus, vocab_size=300, sequence_length=32, packing="documents"),
        seed=0,
        tokenizer_folder=tmp_path / "own",
    )
    rows = [[row[name].tolist() for name in row] for part in (data.train, data.validation) for row in part]
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    assert outputs == [f"{len(rows)} {digest}\n"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 1}, "sequence_length must be 2 or more .* got 1"),
        ({"vocab_size": 256}, r"vocab_size must be 257 or more \(256 bytes and <\|endoftext\|>\), got 256"),
        ({"validation_fraction": 0.0}, "validation_fraction must be between 0 and 1, both excluded, got 0.0"),
        ({"validation_fraction": 1.0}, "validation_fraction must"),
        ({"validation_fraction": float("nan")}, "validation_fraction must"),
        ({"packing": "rows"}, "packing must be concat or documents, got 'rows'"),
        ({"periodic": "spans"}, "periodic must be text, random, both or left out, got 'spans'"),
        ({"periodic": "text", "packing": "documents"}, "periodic must be left out with packing documents"),
        ({"periodic": "random", "sequence_length": 63}, "sequence_length must be 64 or more with periodic, got 63"),
        ({"corpus": ""}, "corpus must not be empty"),
        ({"tokenizer": ""}, "tokenizer must not be empty"),
        ({"tokenizer": "missing/tokenizer"}, "tokenizer: there is no folder missing/tokenizer here"),
    ],
)
def test_wrong_option_is_refused(tmp_path, options, message):
    with pytest.raises(LabError, match=message) as error:
        load(tmp_path, **options)
    assert error.value.exit_code == 2
    assert not (tmp_path / "tokenizer").exists()


def test_size_of_a_bpe_that_is_not_trained_does_not_matter(tmp_path, folder):
    made = load(tmp_path, corpus=write_documents(folder / "a.jsonl", 31), vocab_size=300, sequence_length=8)
    options = {"corpus": str(folder), "vocab_size": 1, "tokenizer": str(tmp_path / "tokenizer"), "sequence_length": 8}

    assert tokens(load(tmp_path / "second", **options).train) == tokens(made.train)


EMPTY = {
    "empty.txt": "",
    "blank.txt": " \n\n\t",
    "empty.jsonl": "\n",
    "nulls.jsonl": '{"text": ""}\n{"text": null}\n{"text": " "}\n' * 20,
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": "a.txt", "validation": "b.txt"}, r"a\.txt: the text for training does not fill"),
        ({"corpus": "a.txt", "validation": "b.txt", "streaming": True}, r"a\.txt: the text for training does not fill"),
        ({"corpus": "b.txt", "validation": "a.txt"}, r"a\.txt: the text for validation does not fill"),
        ({"corpus": "b.txt", "validation_fraction": 0.01}, r"b\.txt: .* validation \(validation_fraction is 0\.01\)"),
        ({"corpus": "b.txt", "streaming": True}, r"b\.txt: .* training .*holds out the first 1000 documents"),
        *(
            ({"corpus": name, "streaming": streaming}, f"{name}: .* does not fill")
            for name in EMPTY
            for streaming in (0, 1)
        ),
    ],
)
def test_text_too_short_for_a_sequence_is_refused(tmp_path, folder, monkeypatch, options, message):
    (folder / "a.txt").write_text("zxjv")  # five tokens: four letters and the end of text
    (folder / "b.txt").write_text("b" * 100)
    for name, content in EMPTY.items():
        (folder / name).write_text(content)
    monkeypatch.chdir(folder)
    with pytest.raises(LabError, match=message):
        load(tmp_path, vocab_size=257, sequence_length=6, **options)


def test_full_disk_is_said_with_the_folder(tmp_path, folder, monkeypatch, cache):
    options = {"corpus": write_documents(folder / "a.jsonl", 31), "vocab_size": 300, "sequence_length": 32}

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("datasets.arrow_writer.ArrowWriter.write", fail)
    with pytest.raises(LabError, match=r"cannot write the data cache .*cache.*No space left on device") as error:
        load(tmp_path, **options)
    assert error.value.exit_code == 3

    monkeypatch.undo()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    rows = tokens(load(tmp_path, **options).train)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "other")
    assert rows == tokens(load(tmp_path, **options).train)  # no half-written file is taken for a complete one


def test_cache_folder_that_cannot_be_made_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.raises(dataset_cache.CacheError, match=r"set HF_DATASETS_CACHE to move it"):
        load(tmp_path)


@pytest.mark.slow
def test_every_block_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    Path("chats.jsonl").write_text(json.dumps({"messages": chat, "id": 1}) + "\n")
    Path("web.csv").write_text('n,text\n1,"a ""b"", c\nd"\n')
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(block, namespace)

    assert {name: tuple(column.shape) for name, column in namespace["batch"].items()} == dict.fromkeys(
        ("input_ids", "position_ids", "labels"), (2, 128)
    )
    assert "First Citizen" in capsys.readouterr().out
    converted = files.read_files(files.find_files("*-texts.jsonl", "corpus"), "text")
    assert [row["text"] for row in converted] == ["2 + 2?\n\n4", 'a "b", c\nd']
