"""Bundle definitions of this package, with everything that they use from it, into one Python file.

The source text is copied, including its comments and docstrings. The file contains only definitions that the given
names use, directly or indirectly, in an order that Python can run. Private names that several modules define are
prefixed with the name of their module.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module

from kvshift_lab.commands.export import portable

PACKAGE = "kvshift"
_INDENT = "    "
_TOOL_COMMENTS = re.compile(r"  # (type: ignore\[[\w, -]+\]|fmt: skip)")
_Position = tuple[int, int]


@dataclass(eq=False)
class _Statement:
    """A top-level statement of a module, with the comments above it and the docstring below it.

    Attributes:
        names: Names that the statement defines; empty for an expression such as a registration.
        first, last: Its first and last line, counted from 1.
        section, position: Module and line of the statement, or of the statement that it replaces.
    """

    module: _Module
    node: ast.stmt
    names: tuple[str, ...]
    first: int
    last: int
    section: str
    position: int

    def used_names(self) -> Iterator[ast.Name]:
        """Yield every name in the statement, except in members that are left out."""
        out = {id(node) for member in self.dropped_members() for node in ast.walk(member)}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and id(node) not in out:
                yield node

    def dropped_members(self) -> list[ast.stmt]:
        """Return the members of a class that are to be left out."""
        if not isinstance(self.node, ast.ClassDef):
            return []
        unwanted = portable.DROPPED.get(self.node.name, ())
        found = [node for node in self.node.body if any(name in unwanted for name in _defined_names(node))]
        if len(found) != len(unwanted):
            raise LookupError(f"{self.module.name}.{self.node.name} does not have all of {', '.join(unwanted)}")
        return found


@dataclass(eq=False)
class _Module:
    """A parsed module: its statements, and the sources of the names that it imports."""

    name: str
    lines: list[str] = field(default_factory=list)
    defined: dict[str, _Statement] = field(default_factory=dict)
    statements: list[_Statement] = field(default_factory=list)
    inner: dict[str, tuple[str, str]] = field(default_factory=dict)
    outer: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text = inspect.getsource(import_module(self.name))
        self.lines = text.splitlines()
        previous: _Statement | None = None
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom | ast.Import):
                self._import(node)
            elif _is_docstring(node):
                if previous is not None:
                    previous.last = node.end_lineno or node.lineno
            else:
                previous = self._add(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.Import):
                self.outer[name] = ast.unparse(ast.Import([alias]))
            elif (node.module or "").split(".")[0] == PACKAGE:
                self.inner[name] = (str(node.module), alias.name)
            elif node.module != "__future__":
                self.outer[name] = ast.unparse(ast.ImportFrom(node.module, [alias], 0))

    def _add(self, node: ast.stmt) -> _Statement:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        while first > 1 and self.lines[first - 2].startswith("#"):
            first -= 1
        last, names = node.end_lineno or node.lineno, tuple(_defined_names(node))
        statement = _Statement(self, node, names, first, last, section=self.name, position=first)
        self.statements.append(statement)
        self.defined |= dict.fromkeys(statement.names, statement)
        return statement


@cache
def _module(name: str) -> _Module:
    """Return the parsed module. The replacements in `portable` get the places of the statements that they replace."""
    found = _Module(name)
    for replacement, module in portable.REPLACED.items() if name == portable.__name__ else ():
        old = _module(module).defined.get(replacement)
        if old is None:
            raise LookupError(f"{name} replaces {module}.{replacement}, which no longer exists")
        found.defined[replacement].section, found.defined[replacement].position = module, old.first
    return found


def _find(module: str, name: str) -> _Statement:
    """Return the statement that defines a name used in a module, following imports and replacements."""
    if portable.REPLACED.get(name) == module:
        return _module(portable.__name__).defined[name]
    here = _module(module)
    if name in here.defined:
        return here.defined[name]
    if name not in here.inner:
        raise LookupError(f"{module} has no {name}")
    return _find(*here.inner[name])


def bundle(roots: Sequence[tuple[str, str]], values: Mapping[tuple[str, str], str]) -> str:
    """Return the source of the given definitions and of everything that they use from this package, imports first.

    Definitions are replaced, and members of classes left out, as `portable` says.

    Args:
        roots: Modules and names in them.
        values: New values of class attributes, by class and attribute, as source text.

    Raises:
        LookupError: A name in the arguments, or a name or member in `portable`, does not exist.
        ValueError: Two modules import different objects by one name, or define the same public name.
    """
    needed: dict[int, _Statement] = {}
    waiting = [_find(module, name) for module, name in roots]
    while waiting:
        statement = waiting.pop(0)
        if id(statement) in needed:
            continue
        needed[id(statement)] = statement
        waiting += _package_names(statement).values()
        for other in statement.module.statements:  # registrations of needed definitions
            uses = _package_names(other) if not other.names else {}
            if uses and all(id(used) in needed for used in uses.values()):
                waiting.append(other)
    kept = list(needed.values())
    new_names = _renamed(kept)
    order = {name: index for index, name in enumerate(_import_order(kept))}
    kept.sort(key=lambda statement: (order[statement.section], statement.position))

    text, section, after_block = "\n".join(_imports(kept)) + "\n", "", False
    for statement in kept:
        is_block = isinstance(statement.node, ast.FunctionDef | ast.ClassDef)
        if statement.section != section:
            section = statement.section
            text += f"\n\n# From {section}\n"
        elif is_block or after_block:
            text += "\n\n"
        text += _text(statement, new_names, values) + "\n"
        after_block = is_block
    return _TOOL_COMMENTS.sub("", text)


def _package_names(statement: _Statement) -> dict[str, _Statement]:
    """Return the statements of this package that a statement uses, by the names that it uses for them."""
    module = statement.module
    found = {}
    for node in statement.used_names():
        if node.id in module.defined or node.id in module.inner:
            found[node.id] = _find(module.name, node.id)
    return {name: used for name, used in found.items() if used is not statement}


def _renamed(kept: Iterable[_Statement]) -> dict[tuple[int, str], str]:
    """Return new names for private names that several modules define, by statement and old name."""
    by_name: dict[str, list[_Statement]] = defaultdict(list)
    for statement in kept:
        for name in statement.names:
            by_name[name].append(statement)
    new = {}
    for name, statements in by_name.items():
        if len(statements) == 1:
            continue
        for statement in statements:
            if not name.startswith("_"):
                raise ValueError(f"{name} is defined in {' and in '.join(s.module.name for s in statements)}")
            new[id(statement), name] = f"_{statement.section.removeprefix(PACKAGE + '.').replace('.', '_')}{name}"
    return new


def _import_order(kept: Sequence[_Statement]) -> list[str]:
    """Return the modules in topological order, each after the modules that it uses."""
    needs: dict[str, set[str]] = defaultdict(set)
    for statement in kept:
        used = {other.section for other in _package_names(statement).values()}
        needs[statement.section] |= used - {statement.section}
    return list(TopologicalSorter({name: sorted(needs[name]) for name in sorted(needs)}).static_order())


def _imports(kept: Iterable[_Statement]) -> list[str]:
    """Return the lines that import from other packages, the standard library first."""
    lines: dict[str, str] = {}
    for statement in kept:
        for node in statement.used_names():
            line = statement.module.outer.get(node.id)
            if line is not None and lines.setdefault(node.id, line) != line:
                raise ValueError(f"{node.id} is imported in two ways: {line}; {lines[node.id]}")
    modules: dict[str, list[str]] = defaultdict(list)
    for line in sorted(set(lines.values())):
        if line.startswith("from "):
            module, what = line.removeprefix("from ").split(" import ", 1)
            modules[module].append(what)
    found = [line for line in set(lines.values()) if line.startswith("import ")]
    found += [_wrapped(module, names) for module, names in modules.items()]
    found.sort(key=lambda line: (line.startswith("from "), line))
    blocks = [
        ["from __future__ import annotations"],
        [line for line in found if _is_standard(line)],
        [line for line in found if not _is_standard(line)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks).split("\n")


def _is_standard(line: str) -> bool:
    return line.split()[1].split(".")[0] in sys.stdlib_module_names


def _wrapped(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 120:
        return line
    block = textwrap.fill(", ".join(names) + ",", 120, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return f"from {module} import (\n{block}\n)"


def _text(
    statement: _Statement, new_names: Mapping[tuple[int, str], str], values: Mapping[tuple[str, str], str]
) -> str:
    """Return the source of a statement with new names and values, without members that are left out."""
    used = _package_names(statement)
    by_name = {name: new_names.get((id(other), name)) for name, other in used.items()}
    by_name |= {name: new_names.get((id(statement), name)) for name in statement.names}
    edits = [
        (_start(node), _end(node), by_name[node.id] or node.id)
        for node in statement.used_names()
        if by_name.get(node.id)
    ]
    lines = [line.encode() for line in statement.module.lines]  # columns count bytes
    node = statement.node
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and by_name.get(node.name):
        column = lines[node.lineno - 1].index(node.name.encode(), node.col_offset)
        new = by_name[node.name] or node.name
        edits.append(((node.lineno, column), (node.lineno, column + len(node.name.encode())), new))
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.value is not None:
                value = values.get((node.name, part.target.id))
                if value is not None:
                    edits.append((_start(part.value), _end(part.value), value))
    for (line, column), (last, end), new in sorted(edits, reverse=True):
        before, after = lines[line - 1][:column], lines[last - 1][end:]
        lines[line - 1 : last] = [before + new.encode() + after, *[b""] * (last - line)]
    gone: set[int] = set()
    for member in statement.dropped_members():
        decorators = getattr(member, "decorator_list", [])
        first = min([member.lineno, *(decorator.lineno for decorator in decorators)])
        gone |= set(range(first, (member.end_lineno or first) + 1))
        if not lines[first - 2].strip():
            gone.add(first - 1)
    kept = range(statement.first, statement.last + 1)
    return b"\n".join(lines[line - 1] for line in kept if line not in gone).decode()


def _defined_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    yield name.id


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _start(node: ast.expr) -> _Position:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> _Position:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
