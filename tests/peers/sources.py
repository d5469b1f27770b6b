"""Other projects' tests as packages: `transformers_tests` and `peft_tests`, below the folder that KVSHIFT_PEERS names.

transformers' source distribution lacks some modules that its tests import. Empty ones take their place, unless PEERS
names a checkout of transformers, which has them all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

CHECKOUT = os.environ.get("PEERS")
# The fields that every configuration has, with values other than the defaults.
COMMON_FIELDS = {
    "chunk_size_feed_forward": 5,
    "id2label": {0: "no", 1: "yes", 2: "perhaps"},
    "label2id": {"no": 0, "yes": 1, "perhaps": 2},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
    "dtype": "float16",
}


def add_to_path() -> None:
    """Make both packages importable."""
    if CHECKOUT:
        package("transformers_tests", Path(CHECKOUT) / "tests")
    else:
        module("exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
        module("generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
        module("utils.test_configuration_utils", config_common_kwargs=COMMON_FIELDS)
    sys.path.append(os.environ["KVSHIFT_PEERS"])


def package(name: str, *folders: Path) -> None:
    """Add a package with the modules of these folders."""
    sys.modules[name] = made = ModuleType(name)
    made.__path__ = [str(folder.absolute()) for folder in folders]


def module(name: str, **members: object) -> None:
    """Add a module with these members to transformers' tests."""
    name = f"transformers_tests.{name}"
    package(name.rpartition(".")[0])
    sys.modules[name] = made = ModuleType(name)
    vars(made).update(members)
