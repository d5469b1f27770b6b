"""Pages with a part that is generated from results: it is committed, can be generated again, and must not be stale."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.check import check_page

from ..benchmarks.scripts import script

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("made", [check_page, script("report")], ids=["check", "serving"])
def test_a_made_page(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree if (ROOT / made.RESULTS).is_dir() else shutil.copy
    for path in (made.PAGE, made.RESULTS):
        (tmp_path / path).parent.mkdir(parents=True)
    copy(ROOT / made.RESULTS, tmp_path / made.RESULTS)
    shutil.copy(ROOT / made.PAGE, tmp_path / made.PAGE)
    monkeypatch.chdir(tmp_path)
    committed = made.PAGE.read_text()
    assert made.main(["--check"]) == 0
    begin, *end = getattr(made, "MARKERS", None) or [made.MARKER]
    stale = (
        committed.partition(begin)[0] + begin + "old\n" + "".join(part + committed.partition(part)[2] for part in end)
    )
    made.PAGE.write_text(stale)
    assert made.main(["--check"]) == 1
    assert "run `make results`" in capsys.readouterr().err
    assert made.PAGE.read_text() == stale
    assert made.main([]) == 0
    assert made.PAGE.read_text() == committed
    for marker in (begin, *end):
        made.PAGE.write_text(committed.replace(marker, ""))
        assert made.main([]) == 1
        assert f"{made.PAGE} must contain the line " in capsys.readouterr().err
    assert made.main(["--chekc"]) == 2
