"""Error messages of commands. Most of them are tested where they are raised."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvshift_lab.core import errors


@pytest.mark.parametrize(("module", "extra"), [("peft.tuners", "peft"), ("lm_eval", "eval"), ("ray", "ray")])
def test_a_missing_package_is_named_with_the_smallest_extra_that_has_it(module: str, extra: str):
    outer = ImportError("transformers could not import a name")
    outer.__cause__ = ModuleNotFoundError(f"No module named {module!r}", name=module)
    fault = errors.missing_package(outer)
    assert str(fault) == f"needs the package {module.partition('.')[0]!r}: {errors.install_command(extra)}"


def test_what_no_extra_brings_is_no_fault_of_the_user():
    assert errors.missing_package(ModuleNotFoundError("No module named 'kvshift.ops.gone'", name="kvshift.ops")) is None
    assert errors.missing_package(ImportError("torch is broken")) is None


def test_the_extras_of_the_lab_are_those_it_declares():
    project = tomllib.loads((Path(__file__).parents[3] / "lab/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*errors._LAB_EXTRAS} == project["optional-dependencies"].keys() - {"test"}
