from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import datasets
import datasets.config
import huggingface_hub
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty cache in each test, and no network."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield folder
    datasets.enable_progress_bars()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for a test's files."""
    path = tmp_path / "files"
    path.mkdir()
    return path
