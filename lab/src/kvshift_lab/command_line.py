"""Parse the options of a command and print its help, with the most used options first.

tyro parses a frozen dataclass from the command line. Its help keeps the order of the fields and the line breaks of
their docstrings, so `read` prints the help from a copy of the dataclass that is made for this purpose.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import tyro

from kvshift_lab.core.errors import LabError


def read(
    options: type,
    args: Sequence[str],
    *,
    prog: str = "kvshift",
    description: str = "",
    example: str = "",
    first: Sequence[str] = (),
    default: Any = None,
) -> Any:
    """Return the options of a command line; with `--help`, `-h` or `--help-all`, print the help and exit.

    Args:
        options: a dataclass; fields that are dataclasses are groups, `--group.field`.
        args: arguments of the command line, without the name of the command.
        prog: the command, such as "kvshift train".
        description: description of the command, in one line.
        example: a command line that works without changes.
        first: names of the options that `--help` lists, in this order, such as "data.corpus"; `--help-all` lists all
            options, these first. If empty, `--help` lists all options.
        default: an instance with default values that replace those of the class.

    Raises:
        SystemExit: with code 0 after the help, with code 2 if the options are wrong.
    """
    given_options = args[: args.index("--")] if "--" in args else args
    asked = {"-h", "--help", "--help-all"}.intersection(given_options)
    if asked:
        known = list(list_options(options, default))
        if example:
            description += "\n\nExample:\n" + textwrap.indent(example, "  ")
        if first and "--help-all" not in asked:
            more = sum(not each.is_positional for each in known)
            description += f"\n\nThe most used options; {prog} --help-all lists all {more}."
            known = [each for each in known if each.name in first or each.is_positional]
        options, args, default = _help_class(options, known, first), ["--help"], None
    given = {} if default is None else {"default": default}
    if os.environ.get("NO_COLOR"):
        os.environ["TERM"] = "dumb"  # tyro prints no colors there, but does not read NO_COLOR
    if not asked and (lines := list(hints(given_options, [option.name for option in list_options(options, default)]))):
        print("\n".join(f"{prog}: {line}" for line in lines), file=sys.stderr)
        raise SystemExit(2)
    return tyro.cli(options, args=args, prog=prog, description=description, **given)


def refuse_repeated(options: type, args: Sequence[str]) -> None:
    """Raise a LabError if an option that takes several values, or `--config`, occurs twice: the last would replace all.

    Of other options the last counts, so that a script can append some to its own.
    """
    given = args[: args.index("--")] if "--" in args else args
    times = Counter(arg.partition("=")[0][2:].replace("-", "_") for arg in given if arg.startswith("--"))
    repeated = [name for name, number in times.items() if number > 1]
    if not repeated:  # the usual case: to list options takes 30 ms
        return
    several = {option.name for option in list_options(options) if option.takes_several} | {"config"}
    for name in repeated:
        if name in several:
            option = f"--{name.replace('_', '-')}"
            raise LabError(
                f"{option} is given twice: give {'one' if name == 'config' else f'all values after one {option}'}"
            )


def hints(args: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    """Yield a line for each unknown option of a command line that abbreviates a known one: --lr, --layers.

    An option is abbreviated by words of its last part, or by their initials; it may lack a final s or have one more.
    tyro suggests what is spelled alike.
    """
    options = {f"--{name.replace('_', '-')}" for name in known}
    for given in (arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("--")):
        if given in options or given.replace("--no-", "--").replace(".no-", ".") in options:
            continue
        last = _last_part(given)
        parts = {option: _last_part(option) for option in sorted(options)}
        initials = [option for option, part in parts.items() if last == "".join(word[:1] for word in part.split("-"))]
        plural = [option for option, part in parts.items() if part in (f"{last}s", last.removesuffix("s"))]
        words = [option for option, part in parts.items() if set(last.split("-")) <= set(part.split("-"))]
        likely = initials or plural or words
        if likely:
            yield f"{given} is not an option; did you mean {' or '.join(likely)}?"


def _last_part(option: str) -> str:
    return option.removeprefix("--").rpartition(".")[2]


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        name: its name, including its group, such as data.corpus.
        hint: its type.
        default: its default; MISSING if the option is required.
        help: its description.
        group: the dataclass that has it as a field.
    """

    name: str
    hint: Any
    default: Any
    help: str
    group: type

    @property
    def is_positional(self) -> bool:
        return tyro.conf.Positional in _metadata(self.hint)

    @property
    def is_flag(self) -> bool:
        """Whether it is given as --option or --no-option, without a value."""
        return self.hint is bool

    @property
    def takes_several(self) -> bool:
        hint = get_args(self.hint)[0] if get_origin(self.hint) is Annotated else self.hint
        return tuple in (get_origin(hint), *map(get_origin, get_args(hint)))

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.hint) if get_origin(self.hint) is Literal else ()


def list_options(cls: type, default: Any = None, prefix: str = "") -> Iterator[Option]:
    """Yield the options of a dataclass and of its groups."""
    hints, texts = get_type_hints(cls, include_extras=True), _docstrings(cls)
    for item in fields(cls):
        hint = hints[item.name]
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        value = _default(item) if default is None else getattr(default, item.name)
        if is_dataclass(kind):
            nameless = any(getattr(each, "name", None) == "" for each in _metadata(hint))
            given = None if value is MISSING else value
            yield from list_options(cast(type, kind), given, prefix if nameless else f"{prefix}{item.name}.")
        else:
            yield Option(prefix + item.name, hint, value, texts.get(item.name, ""), cls)


def _metadata(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _docstrings(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass and of its base classes, as one line."""
    found: dict[str, str] = {}
    for each in (each for each in reversed(cls.__mro__) if "__dataclass_fields__" in vars(each)):
        try:
            body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]).body
        except (OSError, TypeError):  # made by make_dataclass, with all help in annotations
            continue
        for statement, below in pairwise(body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found


def _help_class(options: type, known: Sequence[Option], first: Sequence[str]) -> type:
    """Return a dataclass with the options of `known`: those in `first`, then the others in their groups."""
    ranks = {name: rank for rank, name in enumerate(first)}
    groups: dict[str, list[Option]] = {"": []}
    for each in sorted(known, key=lambda option: ranks.get(option.name, len(ranks))):
        groups.setdefault("" if each.name in ranks else each.name.rpartition(".")[0], []).append(each)
    members: list[Any] = [_help_field(each, each.name) for each in groups.pop("")]
    for name, inside in groups.items():
        group = make_dataclass(name, [_help_field(each, each.name.rpartition(".")[2]) for each in inside], kw_only=True)
        group.__doc__ = inside[0].group.__doc__
        members.append((name, group, field(default_factory=group)))
    return make_dataclass(options.__name__, members, kw_only=True)


def _help_field(option: Option, name: str) -> tuple[str, Any, Any]:
    named = option.hint if name.isidentifier() else Annotated[option.hint, tyro.conf.arg(name=name)]
    default = {"default": option.default} if option.default is not MISSING else {}
    return name.replace(".", "__"), named, field(**default, metadata={"help": option.help})
