"""Mutants of the operator: changes to its source, which show that the tests detect faults."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvshift import ops
from kvshift.ops.cpu.kernel import _BUILDS

ROOT = Path(ops.__file__).parent
BUILD = "-std=c++17 -O1 -fPIC -fopenmp -fno-exceptions -fno-rtti -ffp-contract=off -Wno-psabi"
LINK = "-shared -nodefaultlibs -lc"


@dataclass(frozen=True)
class Mutant:
    """A change to a file of `kvshift.ops`: `right`, which must occur exactly once, is replaced by `wrong`."""

    file: str
    right: str
    wrong: str

    def source(self) -> str:
        source = (ROOT / self.file).read_text()
        assert source.count(self.right) == 1, f"{self.right!r} stands {source.count(self.right)} times in {self.file}"
        return source.replace(self.right, self.wrong)

    @contextmanager
    def in_place(self, folder: Path) -> Iterator[None]:
        """Let every function of the file run the changed code within the context; a CPU kernel is built in `folder`."""
        mutant = self._built(folder) if self.file.endswith((".cpp", ".h")) else self
        module = importlib.import_module("kvshift.ops." + mutant.file.removesuffix(".py").replace("/", "."))
        path = str(module.__file__)
        changed = dict(_codes(compile(mutant.source(), path, "exec", dont_inherit=True)))
        functions = [function for value in vars(module).values() for function in _functions(value, path)]
        before = [(function, function.__code__) for function in functions]
        _forget(module)
        try:
            for function, code in before:
                function.__code__ = changed[code.co_qualname]
            yield
        finally:
            for function, code in before:
                function.__code__ = code
            _forget(module)

    def _built(self, folder: Path) -> Mutant:
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        for path in (*ROOT.glob("cpu/*.cpp"), *ROOT.glob("cpu/*.h")):
            shutil.copy(path, folder)
        (folder / Path(self.file).name).write_text(self.source())
        level, _ = _BUILDS[torch.backends.cpu.get_cpu_capability()]
        command = ["g++", *BUILD.split(), f"-march={level}", *LINK.split(), str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        return Mutant("cpu/kernel.py", 'Path(__file__).with_name(f"_kernel.{build}.so")', f"Path({str(library)!r})")


def _codes(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    yield code.co_qualname, code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _functions(value: Any, path: str) -> Iterator[types.FunctionType]:
    """Yield the functions defined in the file `path`: `value`, the function it wraps, or its methods."""
    while hasattr(value, "__wrapped__"):  # staticmethod, functools.cache
        value = value.__wrapped__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, type):
        for member in vars(value).values():
            if not isinstance(member, type):
                yield from _functions(member, path)
    elif isinstance(value, types.FunctionType) and value.__code__.co_filename == path:
        yield value


def _forget(module: types.ModuleType) -> None:
    """Clear the caches of the module's functions, such as that of loaded kernels."""
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
