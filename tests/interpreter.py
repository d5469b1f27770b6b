"""Patches of Triton's interpreter for tests: kernels run as Python on CPU tensors, with the rounding of a GPU.

On machines without a CUDA device, importing this module makes the interpreter run every Triton kernel that is imported
later. `fix` makes seven changes to the interpreter:
- Conversion to bfloat16 rounds to the nearest, ties to even, as a GPU does, instead of truncating the lower half.
- numpy does not warn of infinities and NaN, which some tests use on purpose.
- Reads and writes outside of the tensors of a launch raise an OutsideError.
- A comparison that is broadcast over a tile stays boolean, and a number computed by a kernel can be a loop bound. The
  oldest and the newest Triton fail at one of these with current versions of numpy.
- Functions called by a kernel do not patch the language again, since the kernel has done so already.
- Repeated lookups are cached, and integers are not checked for overflow, which would double the time.
- Results that depend only on a shape are computed once per shape, which halves the remaining time.
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


def fix() -> None:
    """Apply the changes, unless kernels are compiled or the changes have been applied before."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:  # Triton is not installed: its tests are skipped
        return
    if interpreter._convert_float.__module__ == __name__:
        return
    tensor: Any = tl.tensor
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
        """Patch a module's language once per launch; undo all patches when the kernel, called first, has ended."""
        if id(fn.__globals__) in replaced:
            return None
        scope = patch_language(fn)
        tensor.__index__ = lambda self: int(self.handle.data.item())
        is_kernel = not replaced
        replaced.add(id(fn.__globals__))

        def restore() -> None:
            replaced.clear()
            scope.restore()

        return SimpleNamespace(restore=restore) if is_kernel and hasattr(scope, "restore") else scope

    launch, splat = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder.create_splat
    load, store = interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpreterBuilder.create_masked_store
    given: list[tuple[int, int]] = []  # the addresses of the first and the last element of each tensor of the launch

    def launch_quietly(*args: Any, **kwargs: Any) -> None:
        given[:] = [extent(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.numel()]
        try:
            with np.errstate(all="ignore"):
                launch(*args, **kwargs)
        except interpreter.InterpreterError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # one cause for each function that a kernel calls
                cause = cause.__cause__
            if isinstance(cause, OutsideError):
                raise cause from None
            raise

    def checked_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        require_inside(given, ptrs.data, mask.data, "reads")
        return load(self, ptrs, mask, *others)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        require_inside(given, ptrs.data, mask.data, "writes")
        return store(self, ptrs, value, mask, *others)

    def splat_truth(self: Any, ret_ty: Any, arg: Any) -> Any:
        return splat(self, ret_ty, interpreter.TensorHandle(arg.data, tl.int1) if arg.data.dtype == bool else arg)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_splat = splat_truth
    interpreter.GridExecutor.__call__ = launch_quietly
    interpreter.InterpreterBuilder.create_masked_load = checked_load
    interpreter.InterpreterBuilder.create_masked_store = checked_store
    interpreter._patch_lang = replace_once
    numpy_dtype, of_numbers = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: (of_numbers if type(kind) is tl.dtype else numpy_dtype)(kind)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    _keep_shapes()


class OutsideError(AssertionError):
    """A kernel accesses memory outside of all of its tensors."""


def extent(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first and of the last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + last * x.element_size()


def require_inside(given: list[tuple[int, int]], addresses: np.ndarray, mask: np.ndarray, does: str) -> None:
    """Raise an OutsideError if an unmasked address is in none of the tensors."""
    wanted = addresses[np.broadcast_to(mask, addresses.shape)]
    if not wanted.size:
        return
    low, high = wanted.min(), wanted.max()
    if any(first <= low and high <= last for first, last in given):
        return
    if not np.any([(first <= wanted) & (wanted <= last) for first, last in given], axis=0).all():
        raise OutsideError(f"a kernel {does} memory of none of its tensors")


def _keep_shapes() -> None:
    """Cache what follows from a shape alone: most of the time of an operation goes into the shape of its result."""
    from triton.language import core, semantic

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    of_types: dict[tuple[int, ...], tuple[Any, Any]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size if type(size) is int else size.value for size in shape])
        if key in of_types:
            self.element_ty, (self.shape, self.numel) = element_ty, of_types[key]
            self.name = f"<{self.shape}, {element_ty}>"
        else:
            make_type(self, element_ty, shape)
            of_types[key] = self.shape, self.numel

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.shape if type.is_block() else ()
        if key in of_tensors:
            self.handle, self.type, self.dtype, (self.shape, self.numel) = handle, type, type.scalar, of_tensors[key]
        else:
            make_tensor(self, handle, type)
            of_tensors[key] = self.shape, self.numel

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcast_unlike
