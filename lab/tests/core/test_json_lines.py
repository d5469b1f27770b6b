"""A line is in its file whole or not at all, also after the disk was full or a process was killed."""

from __future__ import annotations

import errno
import io
import math
import os
from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.core.errors import RunFailedError
from kvshift_lab.core.json_lines import JSONLines, read_lines, write_lines

RECORD, LINE = {"index": 0}, b'{"index": 0}\n'


class Disk(io.BytesIO):
    """An unbuffered file on a disk that has room for `size` bytes. `write` stores what fits, and returns its length."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def write(self, content: Any) -> int:
        self.seek(0, os.SEEK_END)  # a file that is open for appending does the same
        if self.size == self.tell():
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(bytes(content)[: self.size - self.tell()])

    def fileno(self) -> int:
        return 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk to which all files are written; tests set its size."""
    disk = Disk(0)
    monkeypatch.setattr("kvshift_lab.core.json_lines.os.fsync", lambda number: None)
    monkeypatch.setattr(Path, "open", lambda *args, **kwargs: disk)
    return disk


@pytest.mark.parametrize("size", range(3 * len(LINE)))
def test_a_disk_that_fills_up_within_a_line(tmp_path: Path, disk: Disk, size: int) -> None:
    """The system then writes a part of the line, and only the next write fails."""
    disk.size = size
    file = JSONLines(tmp_path / "lines", failure="{path}: {error}; its {count} lines are whole")
    fit = size // len(LINE)
    for _ in range(fit):
        file.append([RECORD])
    with pytest.raises(RunFailedError, match=rf"lines: .*No space left on device; its {fit} lines are whole") as error:
        file.append([RECORD])
    assert error.value.exit_code == 3
    assert file.count == fit
    assert disk.getvalue() == LINE * fit
    disk.size = 10**3  # there is room again
    file.append([RECORD])
    assert disk.getvalue() == LINE * (fit + 1)


def test_of_lines_that_belong_together_none_is_left(tmp_path: Path, disk: Disk) -> None:
    disk.size = 2 * len(LINE) + 3
    file = JSONLines(tmp_path / "lines")
    file.append([RECORD])
    with pytest.raises(RunFailedError, match="everything written before is kept"):
        file.append([RECORD, RECORD])
    assert disk.getvalue() == LINE


def test_what_could_not_be_cut_off_is_cut_off_by_the_next_line(tmp_path: Path, disk: Disk, monkeypatch) -> None:
    """Otherwise, the next line would be joined to half of another."""

    def refused(self: Disk, size: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    disk.size = len(LINE) + 3
    file = JSONLines(tmp_path / "lines")
    file.append([RECORD])
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "truncate", refused)
        with pytest.raises(RunFailedError, match="No space left"):
            file.append([RECORD])
    assert disk.getvalue() == LINE + LINE[:3]
    disk.size = 10**3
    file.append([RECORD])
    assert disk.getvalue() == LINE * 2


@pytest.mark.parametrize("repair", [True, False], ids=["keep", "append"])
def test_a_line_without_an_end_is_cut_off(tmp_path: Path, repair: bool) -> None:
    (path := tmp_path / "lines").write_bytes(LINE * 2 + LINE[:-1])
    with JSONLines(path) as file:
        lines = file.read()
        assert lines == [LINE[:-1]] * 2
        assert path.read_bytes() == LINE * 2 + LINE[:-1]  # read() changes nothing: the file may be another run's
        file.truncate_to(lines[: 2 if repair else 1])
        assert path.read_bytes() == LINE * (2 if repair else 1)
        file.append([{"index": 1}])
    assert path.read_bytes() == LINE * (2 if repair else 1) + b'{"index": 1}\n'


@pytest.mark.parametrize(("seconds", "syncs"), [(0, 3), (math.inf, 0), (10, 1)], ids=str)
def test_how_often_it_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, syncs: int
) -> None:
    synced, now = [], [100.0]
    monkeypatch.setattr("kvshift_lab.core.json_lines.os.fsync", synced.append)
    monkeypatch.setattr("kvshift_lab.core.json_lines.time.monotonic", lambda: now[0])
    with JSONLines(tmp_path / "lines", sync_seconds=seconds) as file:
        for now[0] in (100.0, 105.0, 110.0):
            file.append([RECORD])
        assert len(synced) == syncs


def test_a_number_that_json_cannot_hold_changes_nothing(tmp_path: Path) -> None:
    with JSONLines(tmp_path / "lines") as file, pytest.raises(ValueError, match="JSON"):
        file.append([RECORD, {"loss": math.inf}])
    assert (tmp_path / "lines").read_bytes() == b""


def test_a_file_that_is_replaced_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "lines"
    write_lines(path, [RECORD, {"text": "naïve"}])
    assert path.read_bytes() == LINE + '{"text": "naïve"}\n'.encode()

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvshift_lab.core.atomic.os.fsync", full)
    with pytest.raises(RunFailedError, match="No space left on device; everything written before is kept"):
        write_lines(path, [RECORD])
    assert path.read_bytes() == LINE + '{"text": "naïve"}\n'.encode()
    assert [each.name for each in path.parent.iterdir()] == ["lines"]
    assert list(read_lines(path)) == [RECORD, {"text": "naïve"}]
