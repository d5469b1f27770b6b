from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import hypothesis
import pytest
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvshift_lab.core.errors import LabError
from kvshift_lab.data import tokenizers
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.tokenizers import END_OF_TEXT, load_tokenizer, make_tokenizer, train_bpe

TEXT = "to be or not to be, that is the question: whether 't is nobler in the mind to suffer\n" * 5
TOKENIZER = train_bpe(iter([TEXT]), 293)


def train_documents(text: str = TEXT) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [text]})


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@hypothesis.given(st.text())
@hypothesis.example("a<|endoftext|>b")
@hypothesis.example("".join(map(chr, range(256))))
@hypothesis.example("\x00\ufeff\u2028\r\n \ue000\U0010ffff é e\u0301 , ' ! n't")
def test_text_comes_back_as_it_was(text):
    assert TOKENIZER.decode(ids(TOKENIZER, text)) == text


def test_bpe_has_the_size_asked_for_and_learns_from_the_text():
    assert len(TOKENIZER) == 293
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(293))
    assert len(ids(TOKENIZER, "that")) < len(ids(TOKENIZER, "zxjv")) == 4
    assert len(train_bpe(iter([TEXT]), 257)) == 257  # the bytes and the end of text
    small = train_bpe(iter(["ab"]), 10_000)
    assert max(small.get_vocab().values()) == len(small) - 1 < 300
    assert TOKENIZER.bos_token == TOKENIZER.eos_token == TOKENIZER.pad_token == END_OF_TEXT  # as in GPT-2
    assert TOKENIZER.eos_token_id == 0


def test_bpe_learns_from_the_first_characters_of_a_large_text(monkeypatch):
    monkeypatch.setattr(tokenizers, "_BPE_CHARACTERS", 7)
    limited = train_bpe(iter(["abab", "ababab", "cdcdcd" * 99]), 300)

    assert limited.get_vocab() == train_bpe(iter(["abab", "aba"]), 300).get_vocab()


@pytest.mark.slow
def test_bpe_is_the_same_in_another_process_with_other_threads(tmp_path):
    program = (
        "import sys; from kvshift_lab.data.tokenizers import train_bpe;"
        "print(train_bpe(iter(sys.argv[1:]), 293).backend_tokenizer.to_str())"
    )
    texts = [TEXT, TEXT.upper(), TEXT[::-1]]
    environment = {**os.environ, "RAYON_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "true", "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", program, *texts], env=environment, check=True, capture_output=True, text=True
    )

    assert other.stdout.strip() == train_bpe(iter(texts), 293).backend_tokenizer.to_str()


def test_made_once_and_loaded_from_then_on(tmp_path, monkeypatch):
    config = DataConfig(vocab_size=293)
    made = make_tokenizer(config, train_documents(), tmp_path / "run" / "tokenizer")
    monkeypatch.setattr(tokenizers, "train_bpe", None)  # a second training would fail
    loaded = make_tokenizer(config, train_documents("other text"), tmp_path / "run" / "tokenizer")

    assert made.backend_tokenizer.to_str() == loaded.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert loaded.eos_token_id == loaded.bos_token_id == loaded.pad_token_id == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer"]


def test_runs_on_the_same_text_train_it_once(tmp_path, monkeypatch):
    trained = []

    def counting(text, vocab_size):
        trained.append(vocab_size)
        return train_bpe(text, vocab_size)

    monkeypatch.setattr(tokenizers, "train_bpe", counting)
    train_bpe(iter([TEXT]), 280).save_pretrained(tmp_path / "280")
    TOKENIZER.save_pretrained(tmp_path / "293")
    for run, size in enumerate((293, 293, 280)):
        make_tokenizer(DataConfig(vocab_size=size), train_documents(), tmp_path / f"run {run}")
        for path in (tmp_path / str(size)).iterdir():
            assert (tmp_path / f"run {run}" / path.name).read_bytes() == path.read_bytes()
    make_tokenizer(DataConfig(vocab_size=293), train_documents("other text" * 99), tmp_path / "other")
    assert trained == [293, 280, 293]


def test_saved_tokenizer_is_what_transformers_loads(tmp_path):
    make_tokenizer(DataConfig(vocab_size=293), train_documents(), tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)

    assert ids(loaded, TEXT) == ids(TOKENIZER, TEXT)
    assert loaded.decode(ids(loaded, " , a !\n")) == " , a !\n"


def test_tokenizer_by_folder_is_copied_into_the_run(tmp_path):
    TOKENIZER.save_pretrained(tmp_path / "mine")
    config = DataConfig(tokenizer=str(tmp_path / "mine"))
    made = make_tokenizer(config, train_documents("unlike " * 9), tmp_path / "run")

    assert made.get_vocab() == TOKENIZER.get_vocab()
    assert load_tokenizer(tmp_path / "run").get_vocab() == TOKENIZER.get_vocab()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 283}, "made with vocab_size 293, but this run has 283"),
        ({"corpus": "other.txt"}, "made with corpus 'tinyshakespeare', but this run has 'other.txt'"),
        ({"tokenizer": "mine"}, "but this run has"),
    ],
)
def test_folder_with_a_tokenizer_made_otherwise_is_refused(tmp_path, change, message):
    make_tokenizer(DataConfig(vocab_size=293), train_documents(), tmp_path)

    with pytest.raises(LabError, match=message):
        make_tokenizer(DataConfig(**{"vocab_size": 293, **change}), train_documents(), tmp_path)


def test_options_that_do_not_touch_the_tokenizer_may_change(tmp_path):
    make_tokenizer(DataConfig(vocab_size=293), train_documents(), tmp_path)
    again = make_tokenizer(
        DataConfig(vocab_size=293, sequence_length=7, packing="documents"), train_documents(), tmp_path
    )

    assert again.get_vocab() == TOKENIZER.get_vocab()


def test_process_that_comes_second_takes_the_tokenizer_of_the_first(tmp_path, monkeypatch):
    folder = tmp_path / "tokenizer"
    config = DataConfig(vocab_size=293)

    def train_while_another_saves(*args: object) -> PreTrainedTokenizerFast:
        monkeypatch.undo()
        make_tokenizer(config, train_documents(), folder)
        return train_bpe(iter(["slow"]), 293)

    monkeypatch.setattr(tokenizers, "train_bpe", train_while_another_saves)
    made = make_tokenizer(config, train_documents(), folder)

    assert made.get_vocab() == TOKENIZER.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def test_half_saved_tokenizer_is_never_seen(tmp_path, monkeypatch):
    """A save that is killed half-way leaves nothing for another process to find."""

    def save_a_part(self: PreTrainedTokenizerFast, folder: Path) -> None:
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{")
        raise KeyboardInterrupt

    config = DataConfig(vocab_size=293)
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", save_a_part)
    with pytest.raises(KeyboardInterrupt):
        make_tokenizer(config, train_documents(), tmp_path / "tokenizer")
    monkeypatch.undo()
    assert not (tmp_path / "tokenizer").exists()

    assert make_tokenizer(config, train_documents(), tmp_path / "tokenizer").get_vocab() == TOKENIZER.get_vocab()


def test_missing_tokenizer_is_named():
    with pytest.raises(LabError, match="cannot load 'no/such-tokenizer', as a folder or from the hub"):
        load_tokenizer("no/such-tokenizer")


def without_end_of_text(text: str) -> str:
    return json.dumps({name: value for name, value in json.loads(text).items() if name != "eos_token"})


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("made_from.json", lambda text: "{", r"made_from\.json"),
        ("tokenizer.json", lambda text: text[:1000], "cannot load .*, as a folder or from the hub"),
        ("tokenizer_config.json", without_end_of_text, r"has no end-of-text token \(eos_token\)"),
    ],
)
def test_damaged_tokenizer_is_named(tmp_path, file, change, message):
    make_tokenizer(DataConfig(vocab_size=293), train_documents(), tmp_path)
    (tmp_path / file).write_text(change((tmp_path / file).read_text()))

    with pytest.raises(LabError, match=message):
        make_tokenizer(DataConfig(vocab_size=293), train_documents(), tmp_path)


def test_folder_that_is_taken_by_something_else_is_refused(tmp_path):
    (tmp_path / "notes").write_text("mine")

    with pytest.raises(LabError, match="cannot save the tokenizer"):
        make_tokenizer(DataConfig(vocab_size=293), train_documents(), tmp_path)
    assert (tmp_path / "notes").read_text() == "mine"
