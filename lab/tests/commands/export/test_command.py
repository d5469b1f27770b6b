"""`kvshift export` in every format: what is refused, and that a folder is complete or absent."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.commands.export.command import export
from kvshift_lab.commands.export.options import ExportOptions
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.run.loading import load_weights

from ...generation_cases import save_model, tokenizer

CODE, PROGRAMS = {"remote_code": True}, {"remote_code": False}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = save_model(tmp_path / "model")
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("form", "packages", "command"),
    [("onnx", "onnx, onnx_ir, onnxscript, onnxruntime", "pip install "), ("mlx", "mlx, mlx_lm", "pip install mlx-lm")],
)
def test_missing_packages_are_named(form: Any, packages: str, command: str, tmp_path: Path, monkeypatch):
    find = importlib.util.find_spec
    absent = tuple(packages.split(", "))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith(absent) else find(name))
    with pytest.raises(LabError, match=f"format {form} needs the packages {packages}: {command}"):
        export(ExportOptions(model="anything", out=tmp_path / "out", format=form))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "patched", "said"),
    [(CODE, "check_folder", "something else"), (PROGRAMS, "write_programs", "the exported programs do not run")],
    ids=["code", "programs"],
)
def test_it_is_written_whole_or_not_at_all(
    options: dict[str, bool], patched: str, said: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        if patched == "check_folder":
            raise RunFailedError("it computes something else")

    monkeypatch.setattr(f"kvshift_lab.commands.export.command.{patched}", fail)
    with pytest.raises(RunFailedError, match=said):
        export(ExportOptions(model=str(saved), out=tmp_path / "out", **options))
    assert [*tmp_path.iterdir()] == [saved]


def test_onnx_in_bfloat16_is_refused_before_the_work(saved: Path, tmp_path: Path):
    with pytest.raises(LabError, match=r"dtype: ONNX Runtime does not compute in bfloat16, .* give --dtype float32"):
        export(ExportOptions(model=str(saved), out=tmp_path / "out", dtype="bfloat16", format="onnx"))
    assert not (tmp_path / "out").exists()


def test_a_format_of_remote_code_is_refused(saved: Path, tmp_path: Path):
    with pytest.raises(LabError, match="format must be left out with remote_code, got 'pt2'"):
        export(ExportOptions(model=str(saved), out=tmp_path / "out", remote_code=True, format="pt2"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_angles_that_depend_on_the_length_are_refused(form: Any, rope: dict[str, Any], saved: Path, tmp_path: Path):
    rope |= {"rope_theta": 1e4}
    save_model(saved, rope_parameters=rope, original_max_position_embeddings=32)
    with pytest.raises(LabError, match=f"programs cannot have rope_type '{rope['rope_type']}'"):
        export(ExportOptions(model=str(saved), out=tmp_path / "out", format=form))
    assert [*tmp_path.iterdir()] == [saved]


@pytest.mark.parametrize("options", [CODE, PROGRAMS], ids=["code", "programs"])
def test_a_model_that_computes_what_is_not_finite_is_said_so(options: dict[str, bool], saved: Path, tmp_path: Path):
    """The message blames the model itself, not its copy."""
    model = load_weights(saved, device="cpu")
    model.get_output_embeddings().weight.data.fill_(3e38)
    model.save_pretrained(saved)
    with pytest.raises(RunFailedError, match=r"the logits of .* are not finite"):
        export(ExportOptions(model=str(saved), out=tmp_path / "out", **options))
    assert [*tmp_path.iterdir()] == [saved]
