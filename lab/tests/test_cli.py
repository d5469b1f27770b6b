"""Tests of the command line itself; the commands are tested beside their modules."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

import kvshift
from kvshift_lab import cli
from kvshift_lab.core.errors import LabError


@dataclass(frozen=True)
class Options:
    number: int = 3
    """How many, in pieces."""


class InUseError(LabError):
    exit_code = 4


def run(options: Options) -> None:
    if options.number < 0:
        raise InUseError(f"number must be 0 or more, got {options.number}")
    print("number", options.number)


@pytest.fixture
def command(monkeypatch) -> None:
    monkeypatch.setattr(
        cli, "_COMMANDS", {"count": cli._Command("Count pieces", f"{__name__}:Options", f"{__name__}:run")}
    )


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=str)
def test_help_names_every_command(arguments, capsys):
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: kvshift COMMAND [OPTIONS]")
    for name, command in cli._COMMANDS.items():
        assert f"  {name}" in printed
        assert command.summary in printed


HEAVY = {"accelerate", "datasets", "joblib", "matplotlib", "numpy", "pandas", "pyarrow", "scipy", "tensorboard"}
HEAVY |= {"tokenizers", "torch", "transformers"}


def in_a_process(program: str) -> list[Any]:
    """Run a program in a separate process and return the values that it prints, one per line."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """For each list of arguments of `kvshift`, the modules that are loaded when the command has ended."""
    listed = ["--help", "--version"]
    lists = ["reproduce"]
    commands = [*listed, *(f"{name} --help" for name in cli._COMMANDS), *lists]
    loaded = in_a_process(f"""
import contextlib, io, os, sys
from kvshift_lab import cli
for command in {commands!r}:
    if command not in {listed!r}:
        import tyro  # which all others need: imported once
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, command
        continue
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = cli.main(command.split())
    except SystemExit as exit_:
        code = exit_.code
    print(list(sys.modules), flush=True)
    os._exit(code)
""")
    return dict(zip(commands, map(set, loaded), strict=True))


@pytest.mark.parametrize("arguments", ["--help", "--version"])
def test_the_list_of_commands_imports_next_to_nothing(arguments, imported):
    loaded = imported[arguments]
    assert "kvshift_lab.cli" in loaded
    assert not loaded & (HEAVY | {"tyro"})
    assert len(loaded) < 150


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_help_of_a_command_imports_its_options_alone(name, imported):
    """The command's function would import torch and transformers, and take seconds before the first line of help."""
    loaded = imported[f"{name} --help"]
    command = cli._COMMANDS[name]
    assert command.options.partition(":")[0] in loaded
    assert command.function.partition(":")[0] not in loaded
    assert not loaded & HEAVY
    assert len(loaded) < 400


def test_listing_the_recipes_needs_no_torch(imported):
    assert "kvshift_lab.commands.reproduce.command" in imported["reproduce"]
    assert not imported["reproduce"] & HEAVY
    assert len(imported["reproduce"]) < 400


def test_bad_paths_and_options_are_said_before_torch_is_imported(tmp_path):
    """Importing torch takes seconds."""
    no_format, nowhere = "notes.xyz is not in a supported format", "is neither a bundled corpus"
    not_empty = "out must be a new or empty folder"
    said = {
        "train --out {0}/new --data.corpus {0}/notes.xyz": f"corpus: .*{no_format}",
        "train --out {0}/new --data.validation {0}/*.txt": "validation: .*",
        "train --out {0}/new --data.corpus shakespeer": f"corpus: 'shakespeer' {nowhere}",
        "train --out {0}/new --steps 0": "steps must be 1 or more, got 0",
        "compare --out {0}/new --data.corpus {0}/notes.xyz": f"corpus: .*{no_format}",
        "eval {0} {0}/missing.txt": f"texts: .*missing.txt' {nowhere}",
        "eval {0} {0}/notes.xyz": f"texts: .*{no_format}",
        "retrofit {0}/model {0}": not_empty,
        "export {0}/model {0}": not_empty,
        "export {0}/model .": f"{not_empty}, but . is the current directory",
        "export {0}/none {0}/new": "model: there is no folder .*/none",
        "retrofit {0}/none {0}/new": "model: there is no folder .*/none",
        "generate {0}/none --prompt a": "model: there is no folder .*/none",
        "check {0}/none": "model: there is no folder .*/none",
        "analyze {0}/none": "model: there is no folder .*/none",
        "explore {0}/none --out {0}/new": "model: there is no folder .*/none",
        "eval {0}/none --tasks arc_easy --data {0}": "model: there is no folder .*/none",
        "reproduce fig1a": "there is no recipe 'fig1a'; did you mean fig01a",
    }
    (tmp_path / "notes.xyz").write_text("to be")
    ends = in_a_process(f"""
import contextlib, io, sys
from kvshift_lab import cli
for command in {[command.format(tmp_path) for command in said]!r}:
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = cli.main(command.split())
    print((code, errors.getvalue(), "torch" in sys.modules))
""")
    for (command, message), (code, errors, is_imported) in zip(said.items(), ends, strict=True):
        assert (code, is_imported) == (2, False), command
        assert re.search(message, errors), command
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.xyz"]


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{kvshift.__version__}\n"


def test_an_unknown_command_is_named_beside_the_one_that_was_meant(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "kvshift: there is no command 'trian'; did you mean train?\n"
    assert cli.main(["bench"]) == 2
    there = "compare, train, generate, eval, reproduce, analyze, explore, check, retrofit"
    assert capsys.readouterr().err == f"kvshift: there is no command 'bench'; known: {there}, export\n"


def test_help_is_also_a_word(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["help", "train"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: kvshift train")
    assert cli.main(["help"]) == 0
    assert capsys.readouterr().out.startswith("usage: kvshift COMMAND")


def test_options_reach_the_function(command, capsys):
    assert cli.main(["count", "--number", "5"]) == 0
    assert capsys.readouterr().out == "number 5\n"


def test_an_unknown_option_ends_with_2(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["count", "--numbre", "5"])
    assert exit_.value.code == 2
    assert "--numbre" in capsys.readouterr().err


def test_what_the_user_can_fix_is_a_line_and_an_exit_code(command, capsys):
    assert cli.main(["count", "--number", "-1"]) == 4
    captured = capsys.readouterr()
    assert captured.err == "kvshift count: number must be 0 or more, got -1\n"
    assert captured.out == ""


@pytest.mark.parametrize("moment", ["options", "function"])
def test_ctrl_c_while_modules_are_imported(command, monkeypatch, capsys, moment):
    imported = cli._imported

    def interrupted(path):
        if path.endswith({"options": ":Options", "function": ":run"}[moment]):
            raise KeyboardInterrupt
        return imported(path)

    monkeypatch.setattr(cli, "_imported", interrupted)
    assert cli.main(["count"]) == 130
    assert capsys.readouterr().err == "\nkvshift count: interrupted\n"


def test_ctrl_c_inside_exec_ends_with_130_too(tmp_path):
    """`namedtuple` calls `exec`; after an interrupt inside `exec`, `python -m` would end by the signal."""
    program = """
import signal
import kvshift_lab.cli as cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests themselves ignore it
cli._imported = lambda path: exec("import os, signal; os.kill(os.getpid(), signal.SIGINT); input()")
cli.run_and_exit()
"""
    (tmp_path / "started.py").write_text(program)
    command = [sys.executable, "-m", "started", "generate"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "\nkvshift generate: interrupted\n")


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_every_command_has_its_function(name):
    assert callable(cli._imported(cli._COMMANDS[name].function))


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m kvshift_lab train --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("rank", [None, "0"], ids=["alone", "one of several"])
@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["trian"], 2), (["train", "--no-option"], 2)])
@pytest.mark.slow
def test_the_process_ends_with_the_exit_code_and_all_that_was_said(rank, arguments, code):
    """Holds even if the process exits right after Python's exit handlers."""
    program = "import atexit, kvshift_lab.cli as c; atexit.register(lambda: print('last words')); c.run_and_exit()"
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    if rank is not None:
        environment["RANK"] = rank
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.endswith("last words\n")
    assert bool(done.stderr) == (code != 0)
