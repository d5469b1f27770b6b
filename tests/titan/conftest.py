"""Tests of the models in torchtitan; they are skipped if it is not installed. `make test-titan` installs and runs it.

Each test starts as many processes of torch.distributed as its parallelism needs, once for all of its cases.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torchtitan") else ["*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # torchtitan's dependencies emit many warnings
