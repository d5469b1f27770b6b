"""`--config FILE`: options from a YAML or JSON file, such as the config.json of a run.

The options of the file become arguments in front of those of the command line, which thus override them; tyro reads and
checks both alike. The file is as flat as the command line: the options that `compare` shares with `train` are at the
top level, and those of `model`, `data` and `optimizer` one level below.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from kvshift_lab.command_line import list_options, read
from kvshift_lab.core.errors import LabError, nearest
from kvshift_lab.core.options import RECORDED, is_removed

_HELP = "YAML or JSON file of options, such as the config.json of a run; command-line options override the file."


def parse(options: type, args: Sequence[str], **kwargs: Any) -> Any:
    """Return the options of a command from its command line and from the file that `--config` names.

    Args:
        options: the dataclass of the command's options.
        args: arguments of the command line.
        kwargs: keyword arguments of `kvshift_lab.command_line.read`.

    Raises:
        LabError: if the file cannot be read, or contains an unknown option.
        SystemExit: with code 2 if a value is wrong.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", type=Path)
    try:
        path = finder.parse_known_args(args)[0].config
    except argparse.ArgumentError:  # tyro reports the error
        path = None
    # `config` has been read already; it is a field so that the help lists it.
    config = ("config", Annotated[Path | None, tyro.conf.arg(help=_HELP, metavar="FILE")], None)
    both = make_dataclass(
        "Options", [config, ("options", Annotated[options, tyro.conf.arg(name="")], field())], frozen=True, kw_only=True
    )
    return read(both, [*([] if path is None else arguments(options, path)), *args], **kwargs).options


def arguments(options: type, path: Path) -> list[str]:
    """Return the values of a file as arguments of the command line; values that are the default are left out."""
    known = {option.name: option for option in list_options(options)}
    found: list[str] = []
    for name, value in _flat(_read(path), path).items():
        if is_removed(name, value):
            continue
        if name not in known:
            raise LabError(f"config: {path} has an unknown field {name}; {nearest(name, known)}")
        default = known[name].default
        if value == default and isinstance(value, bool) == isinstance(default, bool):  # False == 0
            continue
        group, dot, last = name.replace("_", "-").rpartition(".")
        option = f"--{group}{dot}{last}"
        if known[name].is_flag:
            if not isinstance(value, bool):
                raise LabError(f"config: {path}: {name} must be true or false, got {value!r}")
            found.append(option if value else f"--{group}{dot}no-{last}")
        elif isinstance(value, list):
            found += [option, *map(str, value)]
        elif isinstance(value, bool) and "yes" in known[name].choices:  # YAML's yes and no
            found.append(f"{option}={'yes' if value else 'no'}")
        else:
            found.append(f"{option}={value}")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise LabError(f"config: {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise LabError(f"config: {path} must map options to values, got {type(values).__name__}")
    return {name: value for name, value in values.items() if name not in RECORDED}


class _Loader(yaml.SafeLoader):
    """A loader that refuses a name that is given twice, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.MarkedYAMLError(problem=f"{twice[0]} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _flat(values: Mapping[Any, Any], path: Path, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        part = _flat(value, path, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        if twice := found.keys() & part.keys():
            raise LabError(f"config: {path}: {twice.pop()} is given twice")
        found |= part
    return found
