"""Triton's interpreter, made fit for tests: kernels run as Python on CPU tensors, with the rounding of a GPU.

Where there is no CUDA device, importing this module makes every Triton kernel that is imported later one of the
interpreter's. It changes three things there:
- numbers become bfloat16 by rounding to the nearest, ties to even, as on a GPU, not by cutting off their lower half;
- functions called by a kernel do not replace the whole language anew: it has been replaced for the kernel;
- what is looked up again and again is kept, and integers are not checked for overflow, which would double the time.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def mend() -> None:
    """Make the changes; does nothing where kernels are compiled, or were mended before."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:  # no Triton here: its tests are skipped
        return
    if interpreter._convert_float.__module__ == __name__:
        return
    convert, patch_language = interpreter._convert_float, interpreter._patch_lang
    replaced: set[int] = set()

    def rounded(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if {source.name, target.name} != DTYPES.keys():
            return convert(x, source, target, rounding)
        kind = np.int16 if source.name == "bf16" else np.float32
        given = torch.from_numpy(np.ascontiguousarray(x).view(kind).reshape(-1).copy())
        if source.name == "bf16":
            return given.view(torch.bfloat16).float().numpy().reshape(x.shape)
        return given.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(x.shape)

    def replace_once(fn: Any) -> Any:
        """For all functions of a module at the first of them; undone when the kernel, the first of all, has ended."""
        if id(fn.__globals__) in replaced:
            return None
        scope = patch_language(fn)
        is_kernel = not replaced
        replaced.add(id(fn.__globals__))

        def restore() -> None:
            replaced.clear()
            scope.restore()

        return SimpleNamespace(restore=restore) if is_kernel and hasattr(scope, "restore") else scope

    interpreter._convert_float = rounded
    interpreter._patch_lang = replace_once
    numpy_dtype, of_numbers = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: (of_numbers if type(kind) is tl.dtype else numpy_dtype)(kind)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
