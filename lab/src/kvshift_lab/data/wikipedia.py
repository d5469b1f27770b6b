"""English Wikipedia of 2014, the text of many recipes, built from its source.

    git clone --filter=blob:none --no-checkout https://github.com/ZhouYii/PatchedDistro pages
    git -C pages sparse-checkout set data
    git -C pages checkout 961716d8a5a0df1a6373a4d61e360a0b5d1b85cd
    python -m kvshift_lab.data.wikipedia pages/data texts
    export KVSHIFT_SHARED_DATA=$PWD/texts

The source, 418 MB, is a dump of Wikipedia of spring 2014 as WikiExtractor wrote it: 261,409 pages in 827 files, with
ids from 18.2 to 20.9 million. Pages of 2,000 characters or more are ordered by the SHA-1 of their ids; `SPLITS` are
ranges of this order. `wikipedia_left_out.txt` has the ids of pages that are left out: lists, tables, text that is
mostly not Latin, and what is in the evaluation text of WikiText-2. Every file is compared with the SHA-256 of its
content before the folder appears.

The text is under CC BY-SA 3.0; page ID is https://en.wikipedia.org/wiki?curid=ID.
"""

from __future__ import annotations

import hashlib
import html
import json
import lzma
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from kvshift_lab.core.atomic import new_folder
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.messages import log

FOLDER = "wiki2014-en"
"""Name of the folder in that of KVSHIFT_SHARED_DATA."""

SHORTEST = 2000
"""Characters of the shortest page."""

PAGES = 261_409


@dataclass(frozen=True)
class Split:
    """A file of the result.

    Attributes:
        first: beginning of the hexadecimal SHA-1 of the ids, from which on pages are in this file.
        end: beginning of the SHA-1 of the first page after them.
        sha256: SHA-256 of the content, decompressed.
    """

    first: str
    end: str
    sha256: str


SPLITS = {
    "valid": Split("0", "0227a3", "3f473e8aaebd227b24359aa8b6b9533f4b504edad3167d8a957e03143ab32b18"),
    "train-00": Split("0440119", "1a175e", "e23f73f214ba9185524421a64d8190fcf86454e26e07eca1a16ab95ae96846d5"),
    "train-01": Split("1a175e", "30249b", "62cb931fd6f8cdb9b4e26271d21c3ef3617fce2714c25800d2d58eacded439d6"),
    "train-02": Split("30249b", "454ca9", "152c1c18f7286f99e4ba199ede6bc78e99d193a7cf646e0911a58d2bb65b6f55"),
}

_PAGE = re.compile(r'<doc id="(\d+)" url="[^"]*" title="(.*?)">\n(.*?)</doc>\n', re.DOTALL)
_EDITS = [  # of what templates and tags have left behind
    (re.compile("\xa0"), " "),
    (re.compile(r"<[^<>\n]*>"), ""),
    (re.compile(r'\([\s,;:"]*\)'), ""),
    (re.compile(r'\((?: *[,;:](?: *"" *(?=[,;:]))?)+ *'), "("),
    (re.compile(r"[^\S\n]+([.,;:)])"), r"\1"),
    (re.compile(r" +"), " "),
]


def build_wikipedia(
    source: Path, out: Path, splits: Mapping[str, Split] = SPLITS, left_out: Collection[int] | None = None
) -> None:
    """Write `out`/wiki2014-en: a line {"id", "title", "text"} for each page, in a .jsonl.xz file for each split.

    Args:
        source: folder of the pages, in files wiki_NN of any subfolders.
        out: folder that contains or will contain wiki2014-en, which must not exist.
        splits: the files, and their digests.
        left_out: ids of the pages that are left out; None: those of `wikipedia_left_out.txt`.

    Raises:
        LabError: `source` has no pages, wiki2014-en exists, or the content differs from what `splits` says.
    """
    left_out = _left_out() if left_out is None else left_out
    paths = sorted(source.glob("**/wiki_*"))
    if not paths:
        raise LabError(f"pages: {source} has no files wiki_NN of WikiExtractor")
    lines: dict[str, dict[str, bytes]] = {name: {} for name in splits}
    count = 0
    for path in paths:
        for number, title, text in _pages(path):
            count += 1
            key = hashlib.sha1(str(number).encode()).hexdigest()
            name = next((name for name, split in splits.items() if split.first <= key < split.end), None)
            if name is None or number in left_out:
                continue
            text = clean(title, text)
            if len(text) >= SHORTEST:
                page = {"id": number, "title": html.unescape(title), "text": text}
                lines[name][key] = json.dumps(page, ensure_ascii=False).encode() + b"\n"
    log(f"{count:,} pages in {len(paths)} files of {source}")
    with new_folder(out / FOLDER) as part:
        for name, split in splits.items():
            content = b"".join(line for _, line in sorted(lines[name].items()))
            found = hashlib.sha256(content).hexdigest()
            if found != split.sha256:
                raise LabError(
                    f"pages: the SHA-256 of {name}.jsonl must be {split.sha256}, got {found}, from {count:,} pages; "
                    f"the source has {PAGES:,}: is {source} its folder data, at the commit that "
                    "`python -m kvshift_lab.data.wikipedia --help` names?"
                )
            (part / f"{name}.jsonl.xz").write_bytes(lzma.compress(content, preset=1))
            log(f"{name}.jsonl.xz: {len(lines[name]):,} articles, {len(content) / 1e6:.1f} MB, SHA-256 as expected")


def clean(title: str, text: str) -> str:
    """Return the text of a page without its title, entities, tags, empty lines and what removed templates left."""
    text = html.unescape(text)
    for pattern, replacement in _EDITS:
        text = pattern.sub(replacement, text)
    lines = [line.strip() for line in text.split("\n")]
    if lines[0] == html.unescape(title).strip():
        del lines[0]
    return "\n".join(line for line in lines if line)


def _pages(path: Path) -> Iterator[tuple[int, str, str]]:
    for found in _PAGE.finditer(path.read_text(encoding="utf-8")):
        yield int(found[1]), found[2], found[3]


@cache
def _left_out() -> frozenset[int]:
    text = (files("kvshift_lab.data") / "wikipedia_left_out.txt").read_text(encoding="utf-8")
    return frozenset(map(int, text.split()))


def main(arguments: list[str]) -> int:
    """Build the folder, given the two paths, and return the exit code."""
    if len(arguments) != 2 or arguments[0].startswith("-"):
        print(f"usage: python -m kvshift_lab.data.wikipedia PAGES FOLDER\n\n{__doc__}")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        build_wikipedia(Path(arguments[0]), Path(arguments[1]))
    except LabError as error:
        print(f"python -m kvshift_lab.data.wikipedia: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
