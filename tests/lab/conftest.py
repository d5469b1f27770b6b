"""Fixtures of the tests of generation, loading and prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from .generation_cases import save_model, tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("models") / "model")
    tokenizer().save_pretrained(folder)
    return folder
