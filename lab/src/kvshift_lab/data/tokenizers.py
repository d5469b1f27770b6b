"""The tokenizer of a run: loaded by name or from a folder, or a byte-level BPE trained on the training text."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import datasets
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvshift_lab.core.atomic import read_json
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.messages import log
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.dataset_cache import cached_dataset, fingerprint
from kvshift_lab.data.hub import is_hub_name, require_on_hub
from kvshift_lab.data.pieces import cut_at_lines, without_long_words
from kvshift_lab.data.sources import Documents, texts

END_OF_TEXT = "<|endoftext|>"

# Number of characters to train a BPE on: more would not change its merges, but would take minutes.
_BPE_CHARACTERS = 2**28

# File in the folder of a tokenizer that records the options from which the tokenizer was made.
ORIGIN = "made_from.json"


class SaveError(LabError):
    """Raised when the tokenizer cannot be written, for example because the disk is full."""

    exit_code = 3


def make_tokenizer(config: DataConfig, train: Documents, folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer in `folder`, after creating and saving it there if it does not exist yet.

    Several processes may call this at the same time. They all get the one that was saved first; all would be identical.

    Raises:
        LabError: the tokenizer cannot be loaded or has no end-of-text token, or `folder` has one with other options.
    """
    origin = _origin(config)
    if not (folder / ORIGIN).exists():
        tokenizer = _cached_bpe(train, config.vocab_size) if config.tokenizer is None else _load_named(config.tokenizer)
        _save(tokenizer, origin, folder)
    found = read_json(folder / ORIGIN)
    if found != origin:
        differing = sorted(key for key in found.keys() | origin.keys() if found.get(key) != origin.get(key))
        key = differing[0]
        raise LabError(
            f"{folder} contains a tokenizer made with {key} {found.get(key)!r}, but this run has {origin.get(key)!r}: "
            "give the option as before, or another output folder"
        )
    return load_tokenizer(folder)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder or by its name on the hub.

    Raises:
        LabError: the tokenizer does not exist, cannot be read, or has no end-of-text token to separate documents.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the hub, HTTP and the formats raise exceptions of many types
        raise LabError(f"tokenizer: cannot load {str(name)!r}, as a folder or from the hub: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise LabError(
            f"tokenizer: {str(name)!r} must be one of the tokenizers library (tokenizer.json), got a "
            f"{type(tokenizer).__name__}"
        )
    if tokenizer.eos_token_id is None:
        raise LabError(
            f"tokenizer: {str(name)!r} has no end-of-text token (eos_token), which separates documents: set one in its "
            "tokenizer_config.json, or give another tokenizer"
        )
    return tokenizer


def vocab_size_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of rows that an embedding needs: one more than the largest id, since ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def train_bpe(text: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE like that of GPT-2, which can encode any text without loss.

    `END_OF_TEXT` is token 0 and serves as bos, eos and pad. The same text gives the same tokenizer with any number of
    threads. A small text may yield fewer than `vocab_size` tokens.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _interruptibly(lambda: backend.train_from_iterator(_words(_first_characters(text, _BPE_CHARACTERS)), trainer))
    return _with_end_of_text(backend)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Call `save_pretrained`, and raise an OSError if a file cannot be written."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library raises a plain Exception for system errors
            raise
        raise OSError(str(error)) from error


def _with_end_of_text(backend: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _cached_bpe(documents: Documents, vocab_size: int) -> PreTrainedTokenizerFast:
    """Call `train_bpe` once for all runs on these documents, because it takes 15 seconds for 30 MB."""
    if not isinstance(documents, datasets.Dataset):
        return train_bpe(texts(documents), vocab_size)
    key = fingerprint("bpe", documents._fingerprint, tokenizers.__version__, vocab_size)
    features = datasets.Features({"tokenizer": datasets.Value("string")})
    kept = cached_dataset(_bpe, features, key, documents=documents, vocab_size=vocab_size)
    return _with_end_of_text(tokenizers.Tokenizer.from_str(kept[0]["tokenizer"]))


def _bpe(documents: datasets.Dataset, vocab_size: int) -> Iterator[dict[str, str]]:
    yield {"tokenizer": train_bpe(texts(documents), vocab_size).backend_tokenizer.to_str()}


def _load_named(name: str) -> PreTrainedTokenizerFast:
    folder = Path(name).expanduser()
    if not folder.exists():
        if not is_hub_name(name):
            raise LabError(f"tokenizer: there is no folder {name}")
        require_on_hub(name, "tokenizer")
    return load_tokenizer(folder if folder.exists() else name)


def _origin(config: DataConfig) -> dict[str, Any]:
    if config.tokenizer is not None:
        return {"tokenizer": config.tokenizer}
    decisive = (
        "vocab_size",
        "corpus",
        "hub_config",
        "split",
        "streaming",
        "text_column",
        "validation",
        "validation_fraction",
    )
    return {"tokenizer": None, **{option: getattr(config, option) for option in decisive}}


def _save(tokenizer: PreTrainedTokenizerFast, origin: dict[str, Any], folder: Path) -> None:
    """Save atomically: write to a temporary folder, then rename it, unless another process has saved one first."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            draft = Path(scratch) / folder.name
            save_tokenizer(tokenizer, draft)
            (draft / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
            os.rename(draft, folder)
    except OSError as error:
        if not (folder / ORIGIN).exists():
            raise SaveError(f"cannot save the tokenizer in {folder}: {error}") from error


def _first_characters(text: Iterator[str], characters: int) -> Iterator[str]:
    for document in text:
        yield document[:characters]
        characters -= len(document)
        if characters <= 0:
            return


def _words(text: Iterator[str]) -> Iterator[list[str]]:
    """Yield each document as the pieces that a BPE is trained on; print a message for the first word that is cut."""
    said = False
    for document in text:
        pieces: list[str] = []
        for piece in cut_at_lines(document):
            parts, longest = without_long_words(piece)
            pieces += parts
            if longest and not said:
                log(f"tokenizer: the text has a word of {longest:,} characters; such words are split to train on")
                said = True
        yield pieces


def _interruptibly(work: Callable[[], Any]) -> None:
    """Run `work` in a thread, so that the main thread can handle Ctrl-C, which `work` does not check for."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # daemon: a process that exits does not wait for it
    while not done.done():  # a signal that arrives just before the wait is handled after it
        wait([done], timeout=0.5)
    done.result()
