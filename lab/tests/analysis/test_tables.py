"""Tables for a terminal: no line is longer than requested, and no cell is lost."""

import pytest

from kvshift_lab.analysis.tables import as_markdown, as_text

NUMBERS = [("model", "first", "second", "third"), ("a", "1", "22", "333"), ("longer", "4,444", "5", "6")]
WORDS = [("name", "cost"), ("short", "one two three four five six seven"), ("b", "-")]


def test_numbers_that_do_not_fit_follow_below_with_their_names():
    assert as_text(NUMBERS, width=22).splitlines() == [
        "model   first  second",
        "a           1      22",
        "longer  4,444       5",
        "",
        "model   third",
        "a         333",
        "longer      6",
    ]


def test_words_that_do_not_fit_go_on_below_in_their_column():
    assert as_text(WORDS, left=None, width=20).splitlines() == [
        "name   cost",
        "short  one two three",
        "       four five six",
        "       seven",
        "b      -",
    ]


def test_the_last_cell_of_a_short_row_is_wrapped_too():
    rows = [("name", "preset", "cost"), ("a", "what it is, in so many words"), ("", "smoke", "seconds")]
    assert as_text(rows, left=None, width=24).splitlines() == [
        "name  preset  cost",
        "a     what it is, in so",
        "      many words",
        "      smoke   seconds",
    ]


@pytest.mark.parametrize(("rows", "left"), [(NUMBERS, 1), (NUMBERS, 2), (WORDS, None)])
def test_what_fits_stays_as_it_is(rows, left):
    whole = as_text(rows, left=left)
    longest = max(map(len, whole.splitlines()))
    assert as_text(rows, left=left, width=longest) == whole
    assert max(map(len, as_text(rows, left=left, width=longest - 1).splitlines())) < longest


def test_a_column_wider_than_all_stands_alone():
    rows = [("model", "parameters", "tokens"), ("m", "1", "2")]
    text = as_text(rows, width=5)
    assert text.split("\n\n") == ["model  parameters\nm               1", "model  tokens\nm           2"]


def test_text_and_markdown():
    rows = [("", "vanilla", "KV-shift", "difference"), ("loss", "3.25", "3.125", "-0.125")]
    assert as_text(rows, rule=True).splitlines() == [
        "      vanilla  KV-shift  difference",
        "-----------------------------------",
        "loss     3.25     3.125      -0.125",
    ]
    assert as_markdown(rows).splitlines() == [
        "|  | vanilla | KV-shift | difference |",
        "|---|---:|---:|---:|",
        "| loss | 3.25 | 3.125 | -0.125 |",
    ]
