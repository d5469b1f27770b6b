"""The options of a command and its help, on a dataclass for this test and on all commands."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from dataclasses import dataclass, field
from typing import Annotated

import pytest
import tyro

from kvshift_lab import cli
from kvshift_lab.command_line import read, refuse_repeated
from kvshift_lab.commands.eval.options import EvalConfig
from kvshift_lab.run.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Colour:
    """Colour of the paint (any paint)."""

    red: int = 3
    """Share of red, with a help text that is longer than one line of the terminal and continues in the next source line
    (where a parenthesis begins)."""
    green: int = 5
    """Share of green."""


@dataclass(frozen=True, kw_only=True)
class Base:
    coats: int
    """How many coats."""


@dataclass(frozen=True, kw_only=True)
class Paint(Base):
    wall: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WALL")]
    """Wall to paint."""
    brush: Annotated[str, tyro.conf.arg(help="flat or round")] = "flat"
    colour: Colour = field(default_factory=Colour)
    dry: bool = False
    """Wait until the paint is dry."""


ABOUT = {"prog": "paint", "description": "Paint a wall", "example": "paint north --coats 2"}


def shown(capsys, *args: str, first: tuple[str, ...] = ()) -> str:
    with pytest.raises(SystemExit) as exit_:
        read(Paint, args, **ABOUT, first=first)
    assert exit_.value.code == 0
    return capsys.readouterr().out


def listed(printed: str) -> list[str]:
    return re.findall(r"^[│ ] (--\w[\w.-]*)", printed, re.MULTILINE)


def test_values_come_as_the_class_itself():
    args = ["north", "--coats", "2", "--colour.red", "7"]
    expected = Paint(wall="north", coats=2, colour=Colour(red=7))
    assert read(Paint, args, **ABOUT, first=("colour.red",)) == expected


@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_the_chosen_come_alone_and_in_their_order(asked, capsys):
    printed = shown(capsys, asked, first=("colour.green", "coats"))
    assert listed(printed) == ["--colour.green", "--coats"]
    assert re.search("^[│ ] WALL", printed, re.MULTILINE)  # an argument is not an option
    assert "The most used options; paint --help-all lists all 5." in printed
    assert "Share of green. (default: 5)" in printed
    assert "How many coats. (required)" in printed


def test_defaults_of_an_instance_are_shown_and_used(capsys):
    default = Paint(wall="north", coats=9, colour=Colour(green=8))
    assert read(Paint, ["south"], **ABOUT, default=default) == Paint(wall="south", coats=9, colour=Colour(green=8))
    with pytest.raises(SystemExit):
        read(Paint, ["--help"], **ABOUT, default=default, first=("colour.green", "coats"))
    printed = capsys.readouterr().out
    assert "Share of green. (default: 8)" in printed
    assert "How many coats. (default: 9)" in printed


@pytest.mark.parametrize("wall", ["--help", "--green"])
def test_what_follows_two_dashes_is_no_option(wall):
    assert read(Paint, ["--coats", "2", "--", wall], **ABOUT) == Paint(wall=wall, coats=2)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("eval a b.txt --against c --against d", "--against"),
        ("train --out a --config=b.yaml --config c.yaml", "--config"),
        ("train --out a --model.shift-targets k --model.shift_targets=v", "--model.shift-targets"),
        ("compare --variants smear canon --steps 3 --steps 4 --variants vanilla", "--variants"),
    ],
)
def test_an_option_of_several_values_that_is_given_twice_is_refused(words, option, capsys):
    assert cli.main(words.split()) == 2
    assert f": {option} is given twice" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["train --out config --config=b.yaml", "eval against b.txt --against c"])
def test_a_value_that_is_called_like_an_option_is_none(words):
    refuse_repeated(TrainConfig if words.startswith("train") else EvalConfig, words.split()[1:])


def test_of_another_option_the_last_counts():
    assert read(Paint, ["w", "--coats", "2", "--coats", "3"], **ABOUT) == Paint(wall="w", coats=3)


@functools.cache
def help_of(name: str, asked: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as exit_:
        cli.main([name, asked])
    assert exit_.value.code == 0
    return printed.getvalue()


@pytest.mark.parametrize("name", [name for name, command in cli._COMMANDS.items() if command.first])
def test_a_long_help_lists_the_most_used_options_and_help_all_begins_with_them(name):
    first = [f"--{option.replace('_', '-')}" for option in cli._COMMANDS[name].first]
    everything = listed(help_of(name, "--help-all"))
    assert listed(help_of(name, "--help")) == first == everything[: len(first)]
    assert len(everything) == len(set(everything)) > len(first)
    assert f"--help-all lists all {len(everything)}." in " ".join(help_of(name, "--help").split())


def test_an_abbreviation_is_answered_by_the_option_that_was_meant(capsys):
    words = "train --out new --lr 1e-3 --layers=3 --no-progress --optimizer.lr 1e-3 --step 10"
    with pytest.raises(SystemExit) as stopped:
        cli.main(words.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "kvshift train: --lr is not an option; did you mean --optimizer.learning-rate?",
        "kvshift train: --layers is not an option; did you mean --model.num-hidden-layers?",
        "kvshift train: --optimizer.lr is not an option; did you mean --optimizer.learning-rate?",
        "kvshift train: --step is not an option; did you mean --steps?",
    ]
