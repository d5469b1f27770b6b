"""Rows are written as soon as their case is done; all of a file share commit, options, hardware and versions."""

from __future__ import annotations

import json

import pytest

from kvshift_lab.benchmarks.bench_config import BenchConfig
from kvshift_lab.benchmarks.rows import RowFile
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import options_hash

STAMP = {
    "config_hash": "0123",
    "options": {"rounds": 3},
    "commit": "abc",
    "versions": {"torch": "2.0"},
    "hardware": {"cpu": "one"},
    "started": "now",
}


def rows(case, *implementations):
    return [{"part": "op", "case": case, "contestant": name} for name in implementations]


@pytest.fixture
def path(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl", STAMP)
    file.append(rows("first", "copy", "kv_shift"))
    file.append(rows("second", "copy", "kv_shift"))
    return tmp_path / "rows.jsonl"


def test_rows_carry_where_they_were_measured(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["case"], line["contestant"]) for line in lines] == [
        (case, name) for case in ("first", "second") for name in ("copy", "kv_shift")
    ]
    assert all(line.items() >= STAMP.items() for line in lines)


def test_a_second_call_knows_what_is_done(path):
    again = RowFile(path, {**STAMP, "started": "later"})
    assert again.has("op", "first")
    assert again.has("op", "second")
    assert not again.has("layer", "first")
    again.append(rows("third", "copy"))
    assert len(RowFile(path, STAMP).rows) == 5


@pytest.mark.parametrize("lost", [1, 40, 10**4])
def test_a_case_that_was_cut_off_is_measured_again(path, lost):
    whole = path.read_bytes()
    start_of_second = len(b"".join(whole.splitlines(keepends=True)[:2]))
    path.write_bytes(whole[: max(start_of_second + 5, len(whole) - lost)])
    file = RowFile(path, STAMP)
    assert file.has("op", "first")
    assert not file.has("op", "second")
    file.append(rows("second", "copy", "kv_shift"))
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("commit", "def", "'abc' there, 'def' here"),
        ("options", {"rounds": 5}, "rounds 3 there, 5 here"),
        ("hardware", {"cpu": "two"}, "cpu 'one' there, 'two' here"),
        ("versions", {"torch": "2.1"}, "torch '2.0' there, '2.1' here"),
    ],
)
def test_rows_of_another_kind_are_not_added_to(path, name, value, said):
    before = path.read_bytes()
    with pytest.raises(LabError, match=f"other {name}: {said}"):
        RowFile(path, {**STAMP, name: value})
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"part": "operator", "name": "copy_"}\n')
    with pytest.raises(LabError, match="no rows of `kvshift bench`"):
        RowFile(path, STAMP)
    assert path.read_text() == '{"part": "operator", "name": "copy_"}\n'


def test_a_number_that_json_cannot_hold_is_refused(path):
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        RowFile(path, STAMP).append([{"part": "op", "case": "x", "contestant": "y", "milliseconds": float("nan")}])
    assert path.read_bytes() == before


def test_the_hash_follows_every_option_that_decides_numbers():
    decisive = {"preset": "smoke", "rounds": None}
    assert options_hash(BenchConfig, decisive) == options_hash(BenchConfig, {**decisive, "out": "x", "parts": ["op"]})
    assert options_hash(BenchConfig, decisive) != options_hash(BenchConfig, {**decisive, "rounds": 3})
    assert options_hash(BenchConfig, {"a": 1, "b": 2}) == options_hash(BenchConfig, {"b": 2, "a": 1})
