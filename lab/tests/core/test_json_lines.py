"""A file of records is replaced as a whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvshift_lab.core.errors import RunFailedError
from kvshift_lab.core.json_lines import read_lines, write_lines

RECORD, LINE = {"index": 0}, b'{"index": 0}\n'


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
