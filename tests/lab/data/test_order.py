"""The order of the sequences in training."""

from __future__ import annotations

from itertools import islice

import pytest

from kvshift.lab.core.errors import LabError
from kvshift.lab.data.order import EndlessStream


def test_a_stream_is_repeated():
    rows = [{"input_ids": [0]}, {"input_ids": [1]}]
    assert [*islice(EndlessStream(rows), 5)] == [*rows, *rows, rows[0]]


def test_an_empty_stream_is_refused():
    with pytest.raises(LabError, match="data.corpus: the stream contains no sequence"):
        next(iter(EndlessStream([])))
