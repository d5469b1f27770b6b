"""The command line: `kvshift COMMAND [OPTIONS]`.

A command consists of a frozen dataclass of options, which tyro reads from the command line, and a function that takes
them. They are in separate modules: the options are imported once the command is known, the function once the options
have been read. Importing torch and transformers takes seconds, and `kvshift COMMAND --help` needs neither.
"""

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import kvshift


@dataclass(frozen=True)
class _Command:
    summary: str
    options: str  # module:dataclass; the module imports neither torch nor transformers
    function: str  # module:function; options -> None, raises LabError for what the user can fix
    example: str = ""  # an example command line
    first: tuple[str, ...] = ()  # the options that --help lists; --help-all lists all
    from_file: bool = False  # whether options may also come from a file (`--config`)


_COMMANDS = {
    "compare": _Command(
        "Train paired models, with and without KV shift, and compare them",
        "kvshift_lab.commands.compare.options:CompareConfig",
        "kvshift_lab.commands.compare.command:compare",
        "kvshift compare --out runs/pair --seeds 3 --data.corpus 'texts/*.txt'",
        first=(
            "out",
            "variants",
            "seeds",
            "data.corpus",
            "steps",
            "batch_size",
            "optimizer.learning_rate",
            "model.num_hidden_layers",
            "model.hidden_size",
            "config",
        ),
        from_file=True,
    ),
    "train": _Command(
        "Train a language model on text",
        "kvshift_lab.run.train_config:TrainConfig",
        "kvshift_lab.run.train:train",
        "kvshift train --out runs/mine --data.corpus 'texts/*.txt' --steps 1000",
        first=(
            "out",
            "data.corpus",
            "data.sequence_length",
            "steps",
            "batch_size",
            "optimizer.learning_rate",
            "model.variant",
            "model.num_hidden_layers",
            "model.hidden_size",
            "config",
        ),
        from_file=True,
    ),
    "generate": _Command(
        "Continue prompts with a trained model",
        "kvshift_lab.commands.generate.options:GenerateConfig",
        "kvshift_lab.commands.generate.command:generate",
        'kvshift generate runs/mine --prompt "To be, or not to be"',
    ),
    "eval": _Command(
        "Evaluate a model: loss on a text, benchmarks",
        "kvshift_lab.commands.eval.options:EvalConfig",
        "kvshift_lab.commands.eval.command:evaluate",
        "kvshift eval runs/mine 'texts/*.txt' --against runs/other",
        first=(
            "against",
            "tasks",
            "limit",
            "window",
            "packing",
            "text_column",
            "batch_size",
            "output",
            "device",
        ),
    ),
    "reproduce": _Command(
        "Reproduce the paper's figures and tables",
        "kvshift_lab.commands.reproduce.options:ReproduceConfig",
        "kvshift_lab.commands.reproduce.command:list_or_reproduce",
        "kvshift reproduce fig01a --preset smoke",
    ),
    "analyze": _Command(
        "Analyze a model: induction scores, coefficients, attention maps",
        "kvshift_lab.commands.analyze.options:AnalyzeConfig",
        "kvshift_lab.commands.analyze.command:analyze",
        'kvshift analyze runs/mine --text "To be, or not to be"',
    ),
    "explore": _Command(
        "Make a page that runs one or two models in the browser",
        "kvshift_lab.commands.explore.options:ExploreConfig",
        "kvshift_lab.commands.explore.command:explore",
        "kvshift explore runs/mine --out mine-in-a-page --open",
    ),
    "check": _Command(
        "Test a model: packed documents, padding, caches, generation",
        "kvshift_lab.commands.check.options:CheckConfig",
        "kvshift_lab.commands.check.command:check",
        "kvshift check runs/mine",
    ),
    "retrofit": _Command(
        "Add KV shift to a pretrained model, initialised to the identity",
        "kvshift_lab.commands.retrofit.options:RetrofitOptions",
        "kvshift_lab.commands.retrofit.command:retrofit",
        "kvshift retrofit Qwen/Qwen3-0.6B qwen3-with-shift",
    ),
    "export": _Command(
        "Export programs that run without kvshift, or a folder for the hub",
        "kvshift_lab.commands.export.options:ExportOptions",
        "kvshift_lab.commands.export.command:export",
        "kvshift export runs/mine mine-as-onnx",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kvshift` with `arguments` (default: `sys.argv[1:]`) and return the exit code.

    0: success. 1: an internal error, with its traceback, or a problem found by `check`. 2: bad options or
    input. 3: the run failed while it ran. 4: the run folder is in use. 128 + n: ended by signal n (130 or 143).
    """
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name == "help" and rest:  # `kvshift help train`
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "--help-all", "help"):
        print(_overview())
        return 0
    if name == "--version":
        print(kvshift.__version__)
        return 0
    if name not in _COMMANDS:
        from kvshift_lab.core.errors import nearest

        print(f"kvshift: there is no command {name!r}; {nearest(name, _COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return _run(name, rest)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:  # may also occur while modules are being imported
        print(f"\nkvshift {name}: interrupted", file=sys.stderr)
        return 130


def run_and_exit() -> NoReturn:
    """Run `main` and end this process with its exit code.

    In a run of several processes, each ends as soon as Python's own exit handlers have run. Otherwise the cleanup of
    PyTorch's libraries occasionally aborts a finished process ("terminate called without an active exception", seen
    with torch 2.13 and gloo), and torchrun then reports the whole run as failed.
    """
    try:
        code = main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    # After a Ctrl-C inside `exec`, which namedtuples and dataclasses use, Python exits by SIGINT even if it was caught.
    if "RANK" in os.environ or code == 130:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(name: str, arguments: Sequence[str]) -> int:
    from kvshift_lab.command_line import refuse_repeated
    from kvshift_lab.core.errors import LabError, missing_package

    command = _COMMANDS[name]
    reader = "kvshift_lab.options_file:parse" if command.from_file else "kvshift_lab.command_line:read"
    about = {"description": command.summary, "example": command.example, "first": command.first}
    try:
        kind = _imported(command.options)
        refuse_repeated(kind, arguments)
        options = _imported(reader)(kind, arguments, prog=f"kvshift {name}", **about)
        if os.environ.get("RANK", "0") == "0":  # only the first of several processes reports errors; torchrun ends all
            for look in ("check", "check_paths"):  # before torch is imported
                getattr(options, look, lambda: None)()
        _imported(command.function)(options)
    except LabError as error:
        fault = error
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        fault = missing
    else:
        return 0
    print(f"kvshift {name}: {fault}", file=sys.stderr)
    return fault.exit_code


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _overview() -> str:
    width = max(map(len, _COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in _COMMANDS.items()]
    return "\n".join(
        ["usage: kvshift COMMAND [OPTIONS]", "", *lines, "", "kvshift COMMAND --help shows an example and the options."]
    )
