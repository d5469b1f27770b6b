"""Tests of the models in vLLM; not collected without it. `make test-vllm` installs it and runs them.

vLLM's engine runs in the process of the tests, where its scheduler can be monitored, except in the few tests of several
processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",  # see test_n_grams.py
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
collect_ignore_glob = [] if find_spec("vllm") else ["*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # vLLM's dependencies emit many warnings


@pytest.fixture(autouse=True, scope="session")
def memory_that_nobody_wrote_is_nan() -> None:
    """Override the fixture: vLLM fills buffers only as far as it reads them, and masks the rest."""
    return


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the folder of a model of `tiny_models.py`, given its name."""
    from .tiny_models import TINY_MODELS

    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(7)
            TINY_MODELS[name]().save_pretrained(folders[name])
        return folders[name]

    return folder
