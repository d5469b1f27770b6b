"""The order of the sequences in training."""

from __future__ import annotations

from itertools import islice

import pytest

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.order import EndlessStream, ShuffledEpochs


def test_every_epoch_has_an_order_of_its_own():
    order = list(ShuffledEpochs(sequences=7, count=17, seed=3))
    assert sorted(order[:7]) == sorted(order[7:14]) == list(range(7))
    assert order[:7] != order[7:14]
    assert set(order[14:]) < set(range(7))
    assert list(ShuffledEpochs(sequences=7, count=11, seed=3)) == order[:11]
    assert list(ShuffledEpochs(sequences=7, count=17, seed=4)) != order


def test_a_stream_is_repeated():
    rows = [{"input_ids": [0]}, {"input_ids": [1]}]
    assert [*islice(EndlessStream(rows), 5)] == [*rows, *rows, rows[0]]


def test_an_empty_stream_is_refused():
    with pytest.raises(LabError, match=r"data\.corpus: the stream contains no sequence"):
        next(iter(EndlessStream([])))
