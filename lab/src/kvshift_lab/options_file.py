"""`--config FILE`: options from a YAML or JSON file, such as the config.json of a run.

The command line overrides the file. One file serves `train`, `compare` and `plan`: each command takes the options that
it has. The file is as flat as the command line: the options that `compare` shares with `train` are at the top level,
and those of `model`, `data` and `optimizer` one level below.
"""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import tyro
import yaml

from kvshift_lab.command_line import read
from kvshift_lab.compare.compare_config import CompareConfig
from kvshift_lab.core.errors import LabError, nearest
from kvshift_lab.core.options import RECORDED
from kvshift_lab.plan.plan_config import PlanConfig
from kvshift_lab.training.train_config import TrainConfig

_HELP = "YAML or JSON file of options, such as the config.json of a run; command-line options override the file."


def parse(options: type, args: Sequence[str], **kwargs: Any) -> Any:
    """Return the options of a command from its command line and from the file that `--config` names.

    Args:
        options: the dataclass of `train`, `compare` or `plan`.
        args: arguments of the command line.
        kwargs: keyword arguments of `kvshift_lab.command_line.read`.

    Raises:
        LabError: if the file cannot be read, or contains an unknown option or a wrong value.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", type=Path)
    try:
        path = finder.parse_known_args(args)[0].config
    except argparse.ArgumentError:  # tyro reports the error
        path = None
    # `config` has been read already; it is a field so that the help lists it.
    both = make_dataclass(
        "Options",
        [
            ("config", Annotated[Path | None, tyro.conf.arg(help=_HELP, metavar="FILE")], None),
            (
                "options",
                Annotated[options, tyro.conf.arg(name="")],
                field() if path is None else field(default=with_file(options, path)),
            ),
        ],
        frozen=True,
        kw_only=True,
    )
    return read(both, args, **kwargs).options


def with_file(options: type, path: Path) -> Any:
    """Return the defaults of `options`, replaced by the values of the file."""
    values = _read(path)
    is_record = "config_hash" in values
    values = {name: value for name, value in values.items() if name not in RECORDED}
    known: dict[str, Any] = {}
    for each in (TrainConfig, CompareConfig, PlanConfig):
        known = _merged(known, _names(each))
    _refuse_unknown(values, known, f"config: {path}", "")
    if options is TrainConfig:
        return _over(TrainConfig(out=tyro.MISSING), values, path)
    if options is PlanConfig:
        if values.get("init_from") is not None and not is_record:
            raise LabError(
                f"config: {path} names init_from ({values['init_from']}), from which kvshift plan does not read the "
                "model's sizes: give the config.json of a run, or replace init_from by model.config"
            )
        return _over(PlanConfig(), values, path)
    if is_record:
        values.pop("out", None)  # the folder of a run is not that of a comparison
    default = CompareConfig()
    return replace(_over(default, values, path), train=_over(default.train, values, path))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError) as error:
        raise LabError(f"config: {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise LabError(f"config: {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise LabError(f"config: {path} must map options to values, got {type(values).__name__}")
    return values


def _names(cls: type) -> dict[str, Any]:
    """Return the options of a class by name; the value is None, or the options of a group."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        if cls is CompareConfig and name == "train":
            found |= _names(hint)
        else:
            found[name] = _names(cast(type, hint)) if is_dataclass(hint) else None
    return found


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    groups = {name: _merged(one[name], other[name]) for name in one.keys() & other.keys() if one[name] is not None}
    return one | other | groups


def _refuse_unknown(values: Mapping[Any, Any], known: Mapping[str, Any], file: str, prefix: str) -> None:
    for name, value in values.items():
        if name not in known:
            group, _, rest = str(name).partition(".")
            hint = f"write {rest} below {group}" if known.get(group) else nearest(str(name), known)
            raise LabError(f"{file} has an unknown field {prefix}{name}; {hint}")
        if known[name] is not None:
            if not isinstance(value, dict):
                raise LabError(f"{file}: {prefix}{name} must map options to values, got {value!r}")
            _refuse_unknown(value, known[name], file, f"{prefix}{name}.")


def _over(default: Any, values: Mapping[str, Any], path: Path, prefix: str = "") -> Any:
    """Return `default` with the values of its own fields; values for other commands are ignored."""
    hints = get_type_hints(type(default))
    changes = {}
    for item in fields(default):
        if item.name in values:
            now, value = getattr(default, item.name), values[item.name]
            if is_dataclass(now):
                changes[item.name] = _over(now, value, path, f"{prefix}{item.name}.")
            else:
                changes[item.name] = _value(hints[item.name], value, f"config: {path}: {prefix}{item.name}")
    return replace(default, **changes)


def _value(hint: Any, value: Any, where: str) -> Any:
    """Convert a value of the file to the type of its option."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    literals = [each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)]
    if isinstance(value, bool) and bool not in kinds and "yes" in literals:  # YAML's yes and no
        return "yes" if value else "no"
    if type(value) in kinds or (isinstance(value, str) and value in literals):
        return value
    if isinstance(value, list):
        for kind in kinds:
            if get_origin(kind) is tuple:
                return tuple(_value(get_args(kind)[0], each, where) for each in value)
    if isinstance(value, str) and Path in kinds:
        return Path(value)
    if float in kinds and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except ValueError:
            pass
    expected = [repr(each) for each in literals] + [_word(kind) for kind in kinds if get_origin(kind) is not Literal]
    raise LabError(f"{where} must be {' or '.join(expected)}, got {value!r}")


def _word(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return "a list"
    words = {bool: "true or false", int: "a whole number", float: "a number", types.NoneType: "null"}
    return words.get(kind, "text")
