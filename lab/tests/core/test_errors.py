"""Error messages of commands. Most of them are tested where they are raised."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.core import errors

INSTALLED: dict[str, tuple[dict[str, Any] | None, str]] = {
    "from an index": (None, "pip install 'kvshift-lab[eval]'"),
    "from a clone": (
        {"url": "file:///home/a%20b/kvshift/lab", "dir_info": {}},
        "pip install '/home/a b/kvshift/lab[eval]'",
    ),
    "editable": (
        {"url": "file:///home/kvshift/lab", "dir_info": {"editable": True}},
        "pip install -e '/home/kvshift/lab[eval]'",
    ),
    "from a wheel": (
        {"url": "file:///dist/kvshift_lab-0.1.0-py3-none-any.whl", "archive_info": {}},
        "pip install '/dist/kvshift_lab-0.1.0-py3-none-any.whl[eval]'",
    ),
    "from an address": (
        {"url": "https://example.org/kvshift.zip", "archive_info": {}},
        "pip install 'kvshift-lab[eval] @ https://example.org/kvshift.zip'",
    ),
    "from git": (
        {
            "url": "https://example.org/kvshift",
            "vcs_info": {"vcs": "git", "commit_id": "5c5feb4"},
            "subdirectory": "lab",
        },
        "pip install 'kvshift-lab[eval] @ git+https://example.org/kvshift@5c5feb4#subdirectory=lab'",
    ),
}


@pytest.mark.parametrize(("module", "extra"), [("peft.tuners", "peft"), ("lm_eval", "eval"), ("ray", "ray")])
def test_a_missing_package_is_named_with_the_smallest_extra_that_has_it(module: str, extra: str):
    outer = ImportError("transformers could not import a name")
    outer.__cause__ = ModuleNotFoundError(f"No module named {module!r}", name=module)
    fault = errors.missing_package(outer)
    assert str(fault) == f"needs the package {module.partition('.')[0]!r}: {errors.install_command(extra)}"


def test_what_no_extra_brings_is_no_fault_of_the_user():
    assert errors.missing_package(ModuleNotFoundError("No module named 'kvshift.ops.gone'", name="kvshift.ops")) is None
    assert errors.missing_package(ImportError("torch is broken")) is None


@pytest.mark.parametrize("how", INSTALLED)
def test_an_extra_is_installed_from_where_the_package_was(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    origin, command = INSTALLED[how]
    info = tmp_path / "kvshift_lab-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: kvshift-lab\nVersion: 0.1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert errors.install_command("eval") == command


def test_the_extras_of_the_lab_are_those_it_declares():
    project = tomllib.loads((Path(__file__).parents[3] / "lab/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*errors._LAB_EXTRAS} == project["optional-dependencies"].keys() - {"test"}
