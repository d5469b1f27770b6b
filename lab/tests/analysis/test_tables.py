"""Tables for a terminal: no line is longer than requested, and no cell is lost."""

from kvshift_lab.analysis.tables import as_markdown, as_text

WORDS = [("name", "cost"), ("short", "one two three four five six seven"), ("b", "-")]


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
