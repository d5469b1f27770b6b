"""Tests of the models in torchtitan. Where it is not installed they are left out; `make test-titan` has an environment.

Each test starts processes of torch.distributed, as many as its parallelism needs, for all its cases at once.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torchtitan") else ["*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # torchtitan's dependencies have many, of their authors' style
