"""ONNX Runtime for WebAssembly is downloaded once, and compared with its SHA-256."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from kvshift_lab.commands.explore import web_runtime
from kvshift_lab.core.errors import LabError


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an archive that replaces the registry's; the cache is empty."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(web_runtime, "FILES", {"a.mjs": hashlib.sha256(b"code").hexdigest()})
    path = tmp_path / "runtime.tgz"
    with tarfile.open(path, "w:gz") as file:
        for name, content in {"package/other": b"x", "package/dist/a.mjs": b"code"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path.as_uri()


def test_downloaded_once(archive: str, tmp_path: Path):
    said: list[str] = []
    for _ in range(2):
        folder = web_runtime.runtime_folder(said.append, archive)
    assert len(said) == 1
    assert archive in said[0]
    web_runtime.copy_runtime(folder, tmp_path / "copy")
    assert (tmp_path / "copy" / "a.mjs").read_bytes() == b"code"


def test_offline(archive: str, tmp_path: Path):
    with pytest.raises(LabError, match=r"is not in .* and could not be downloaded from file:.*npm pack"):
        web_runtime.runtime_folder(lambda text: None, (tmp_path / "nowhere.tgz").as_uri())


def test_other_bytes(archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = web_runtime.runtime_folder(lambda text: None, archive)
    (folder / "a.mjs").write_bytes(b"other")
    with pytest.raises(LabError, match=r"the SHA-256 of a\.mjs must be"):
        web_runtime.copy_runtime(folder, tmp_path / "copy")
    (folder / "a.mjs").unlink()
    monkeypatch.setattr(web_runtime, "FILES", {"a.mjs": "0"})
    with pytest.raises(LabError, match=r"the SHA-256 of a\.mjs must be"):
        web_runtime.runtime_folder(lambda text: None, archive)
    assert not (folder / "a.mjs").exists()


def test_a_file_that_is_not_there(archive: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web_runtime, "FILES", {"b.wasm": "0"})
    with pytest.raises(LabError, match=r"has no b\.wasm"):
        web_runtime.runtime_folder(lambda text: None, archive)
