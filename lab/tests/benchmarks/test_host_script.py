"""benchmarks/host.py counts the operations that are counted by hand here."""

from __future__ import annotations

import json
import sys

import pytest

from .scripts import script

host = script("host")


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], dict]:
    return {(row["cache"], row["model"]): row for row in host.measure(rounds=0)}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_shift_takes_no_operation_of_its_own(rows, cache):
    ours, plain = rows[cache, "kv shift"]["operations"], rows[cache, "vanilla"]["operations"]
    theirs = rows[cache, host.BASELINE]["operations"]
    assert plain < theirs
    assert ours == plain  # one call of the kernel in each layer: shift, rotation, state and cache
    assert ours < theirs


def test_the_command(monkeypatch, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["host.py", "--rounds", "2", "--out", str(out)])
    monkeypatch.setattr(host, "TOKENS", 3)
    host.main()
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == len(capsys.readouterr().out.splitlines()) == 2 * len(host.MODELS)
    for row in written:
        assert row["microseconds"] > 0
        assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]
        assert row["fastest"] == 1 if row["model"] == host.BASELINE else row["fastest"] > 0
        assert row["commit"]
