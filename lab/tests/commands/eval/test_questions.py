"""Files of benchmarks that are missing or broken: each error names the file, the place and what should be there."""

from __future__ import annotations

import bz2
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshift_lab.commands.eval.benchmarks import find_data, load_tasks
from kvshift_lab.core.errors import LabError

from .benchmark_cases import write_benchmarks

LAMBADA = "lambada/lambada_openai.jsonl"
WINOGRANDE = "winogrande/winogrande_xl_dev.jsonl"
HELLASWAG = "hellaswag/hellaswag_val_full.txt.bz2"
ARC = "arc/arc_easy_test.jsonl"
MMLU = "mmlu/test/anatomy_test.csv"
MMLU_HEAD = b"question,choice0,choice1,choice2,choice3,answer\n"
CMMLU = "cmmlu/dev/agronomy.csv"
TASK_OF = {"arc": "arc_easy"} | {name: name for name in ("lambada", "winogrande", "hellaswag", "mmlu", "cmmlu")}
CMMLU_HEAD = b",Question,A,B,C,D,Answer\n"


def question(**fields: object) -> bytes:
    return json.dumps({"query": "Question: Warm?", "choices": ["ice", "fire"], "gold": 1} | fields).encode()


def described(text: str) -> bytes:
    return bz2.compress(text.encode())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (LAMBADA, None, "cannot be read: .*No such file"),
        (LAMBADA, b"", ":1 must be a JSON object: Expecting value"),
        (LAMBADA, b'{"context": "to be"', ":1 must be a JSON object: "),
        (LAMBADA, b'["to be", "or"]', r":1 must be a JSON object, got \['to be', 'or'\]"),
        (LAMBADA, b"\xff", "cannot be read: .*invalid start byte"),
        (LAMBADA, b'{"context": "to be"}', ":1: continuation must be a text that is not empty, but is missing"),
        (LAMBADA, b'{"context": null, "continuation": "be"}', ":1: context must be a text .*, got null"),
        (WINOGRANDE, b'{"context_options": ["one"]}', r':1: context_options must be a list .*, got \["one"\]'),
        (ARC, question(gold=2), ":1: gold must be an index of choices, 0 to 1, got 2"),
        (ARC, question(gold=-1), ":1: gold must be an index of choices, 0 to 1, got -1"),
        (ARC, question(gold=True), ":1: gold must be an index of choices, 0 to 1, got true"),
        (ARC, question(gold="1"), ':1: gold must be an index of choices, 0 to 1, got "1"'),
        (ARC, question(choices=["ice", ""]), ":1: choices must be a list of two to eight texts"),
        (HELLASWAG, b"not bz2", "cannot be read: Invalid data stream"),
        (HELLASWAG, described("a\n0\nb\nc\nd\ne\n")[:-4], "cannot be read: Compressed data ended"),
        (HELLASWAG, described("a\n0\nb\nc\nd\n"), "must have six lines for each question, got 5 lines"),
        (HELLASWAG, described("a\n4\nb\nc\nd\ne\n"), ":2: the label must be one of 0, 1, 2, 3, got '4'"),
        (HELLASWAG, described("a\n0\nb\n\nd\ne\n"), ":1: endings must be a list of two to eight texts"),
        (MMLU, MMLU_HEAD + b"Red?,a,b,c,d,4\n", ":2: answer must be one of 0, 1, 2, 3, got '4'"),
        (MMLU, MMLU_HEAD + b"Red?,a,b,c,d\n", ":2: answer must be a text that is not empty, got null"),
        (MMLU, MMLU_HEAD + b"Red?,a,b,c,d,1,2\n", ":2 must have as many fields as the header, got more"),
        (MMLU, MMLU_HEAD + b'Red?,a,b,c,"d,1\n', "cannot be read after line 1: unexpected end of data"),
        (MMLU, b"Red?,a,b,c,d,1\nBlue?,a,b,c,d,1\n", ":2: question must be .*, but is missing"),
        (CMMLU, CMMLU_HEAD + b"0,Red?,a,b,c,d,E\n", ":2: Answer must be one of A, B, C, D, got 'E'"),
    ],
)
def test_broken_files(file: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = write_benchmarks(tmp_path) / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LabError, match=f"^data: {re.escape(str(path))}:? ?{message}"):
        load_tasks([TASK_OF[file.partition("/")[0]]], str(tmp_path))


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("mmlu", lambda folder: shutil.rmtree(folder / "mmlu" / "dev"), r"mmlu/dev must have a file SUBJECT_dev\.csv"),
        ("mmlu", lambda folder: empty_tables(folder / "mmlu" / "test", MMLU_HEAD), "mmlu has no questions"),
        ("cmmlu", lambda folder: (folder / CMMLU).rename(folder / CMMLU.replace("agronomy", "alchemy")), "alchemy"),
    ],
)
def test_folders_of_subjects(task: str, change: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    change(write_benchmarks(tmp_path))
    with pytest.raises(LabError, match=f"^data: .*{message}"):
        load_tasks([task], str(tmp_path))


def empty_tables(folder: Path, head: bytes) -> None:
    for path in folder.glob("*.csv"):
        path.write_bytes(head)


def test_where_the_files_are(tmp_path, monkeypatch):
    with pytest.raises(LabError, match="data must be a folder that exists, got /absent"):
        find_data("/absent")
    monkeypatch.setenv("KVSHIFT_SHARED_DATA", str(tmp_path))
    assert find_data(None) == str(tmp_path)
    monkeypatch.setenv("KVSHIFT_SHARED_DATA", "")
    with pytest.raises(LabError, match="data must be the folder of the benchmarks' files, or KVSHIFT_SHARED_DATA"):
        find_data(None)
