"""The record of the program and the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvshift_lab.core import environment


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_reading_the_commit_does_not_lock_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`git status` refreshes the index; killed in between, as with a run, it would leave a lock that stops git."""

    def git(*arguments: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *named, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    module = tmp_path / "module.py"
    module.write_text("1\n")
    git("init", "--quiet")
    git("add", module.name)
    git("commit", "--quiet", "-m", "first")
    monkeypatch.setattr(environment, "__file__", str(module))
    os.utime(module, ns=(0, 0))  # the index has another time
    index = (tmp_path / ".git" / "index").read_bytes()
    assert environment._commit() == git("rev-parse", "HEAD")
    assert (tmp_path / ".git" / "index").read_bytes() == index
    module.write_text("2\n")
    assert environment._commit() == git("rev-parse", "HEAD") + "+"
