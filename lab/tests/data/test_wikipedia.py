"""The English Wikipedia of the recipes, built from pages of WikiExtractor."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from pathlib import Path

import pytest

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.config import SHARED_DATA_ENV
from kvshift_lab.data.wikipedia import FOLDER, SPLITS, Split, build_wikipedia, clean, main

SHARED = Path(os.environ.get(SHARED_DATA_ENV) or "no-such-folder") / FOLDER
LONG = "A sentence of a page that is long enough to stay. " * 41
PAGES = {  # the SHA-1 of the ids: 356a192b, da4b9237, 77de68da, 1b645389, ac3478d6
    1: (
        "Caf&eacute; &amp; bar",
        f"Café &amp; bar\n\nThe &lt;b&gt;bar&lt;/b&gt; (, &quot;x&quot;) is old .\n\n{LONG}",
    ),
    2: ("Long", f"Long\n\n{LONG}"),
    3: ("Short", "Short\n\nToo short.\n"),
    4: ("Left out", f"Left out\n\n{LONG}"),
    5: ("Beyond", f"Beyond\n\n{LONG}"),
}
FIRST = {"id": 1, "title": "Café & bar", "text": f'The bar ("x") is old.\n{LONG.strip()}'}
SECOND = {"id": 2, "title": "Long", "text": LONG.strip()}


def digest(*pages: dict) -> str:
    lines = (json.dumps(page, ensure_ascii=False) + "\n" for page in pages)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def content(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes())


TINY = {"valid": Split("3", "4", digest(FIRST)), "train-00": Split("d", "e", digest(SECOND))}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for number, (title, text) in PAGES.items():
        path = tmp_path / "pages" / f"A{number % 2}" / f"wiki_{number:02}"
        path.parent.mkdir(parents=True, exist_ok=True)
        head = f'<doc id="{number}" url="http://en.wikipedia.org/wiki?curid={number}" title="{title}">'
        path.write_text(f"{head}\n{text}\n</doc>\n", encoding="utf-8")
    (tmp_path / "pages/.DS_Store").write_bytes(b"\xff\x00")
    return tmp_path / "pages"


def test_pages_are_cleaned_and_divided_by_the_hash_of_their_ids(source: Path, tmp_path: Path) -> None:
    build_wikipedia(source, tmp_path / "texts", TINY, left_out={4})
    folder = tmp_path / "texts/wiki2014-en"
    assert sorted(path.name for path in folder.iterdir()) == ["train-00.jsonl.xz", "valid.jsonl.xz"]
    read = {name: [json.loads(line) for line in content(folder / f"{name}.jsonl.xz").splitlines()] for name in TINY}
    assert read == {"valid": [FIRST], "train-00": [SECOND]}


def test_other_content_is_refused_and_no_folder_appears(source: Path, tmp_path: Path) -> None:
    (source / "A0/wiki_02").write_text("", encoding="utf-8")
    with pytest.raises(LabError, match=r"SHA-256 of train-00\.jsonl must be .*, from 4 pages; the source has 261,409"):
        build_wikipedia(source, tmp_path / "texts", TINY, left_out={4})
    assert not list((tmp_path / "texts").iterdir())


def test_the_command_names_what_is_wrong(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "git clone" in capsys.readouterr().out
    assert main([]) == 2
    assert main([str(tmp_path / "nothing"), str(tmp_path / "texts")]) == 2
    assert "has no files wiki_NN" in capsys.readouterr().err
    assert main([str(source), str(tmp_path / "texts")]) == 2  # five pages are not the text of the records
    assert "SHA-256 of valid.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("5\xa0km (, ) away", "5 km away"),
        ("Said Akl (, also; Saïd)", "Said Akl (also; Saïd)"),
        ('(, ""; ; 22 September)', "(22 September)"),
        ('single ("", ""Even"")', 'single ("", ""Even"")'),
        ("(of age\nMSWD < 1 and\n2 > 1)", "(of age\nMSWD < 1 and\n2 > 1)"),
        ("one\n, two", "one\n, two"),
    ],
)
def test_what_templates_left_is_removed(text: str, cleaned: str) -> None:
    assert clean("Title", f"Title\n\n{text}\n") == cleaned


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="KVSHIFT_SHARED_DATA names no folder with this text")
def test_the_digests_are_those_of_the_text_of_the_records() -> None:
    for name, split in SPLITS.items():
        assert hashlib.sha256(content(SHARED / f"{name}.jsonl.xz")).hexdigest() == split.sha256, name
