"""A model that continues texts, and tiny runs of `kvshift train`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import datasets
import datasets.config
import pytest

from kvshift_lab.run.train import train

from .generation_cases import save_model, tokenizer
from .run_cases import tiny, write_corpus


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("models") / "model")
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests a separate cache of packed text, in this process and in those that it starts."""
    folder = str(tmp_path_factory.mktemp("datasets"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(folder))
        patch.setitem(os.environ, "HF_DATASETS_CACHE", folder)
        datasets.disable_progress_bars()
        yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="session")
def corpus(cache_of_tests: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.jsonl")


@pytest.fixture(scope="session")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run without interruption. Tests must not change it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(tiny(corpus, out))
    return out


@pytest.fixture(scope="session")
def vanilla(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that differs from `finished` only in having no shift."""
    out = tmp_path_factory.mktemp("vanilla") / "run"
    train(tiny(corpus, out, model={"shift_targets": ()}))
    return out


@pytest.fixture(scope="session")
def vanilla_documents(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that differs from `vanilla` only in keeping documents apart."""
    out = tmp_path_factory.mktemp("vanilla") / "run"
    train(tiny(corpus, out, model={"shift_targets": ()}, data={"packing": "documents"}))
    return out
