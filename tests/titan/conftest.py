"""Tests of the models in torchtitan; not collected without it. `make test-titan` installs it and runs them.

Each test starts as many processes of torch.distributed as its parallelism needs, once for all of its cases.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torchtitan") else ["*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # torchtitan's dependencies emit many warnings
