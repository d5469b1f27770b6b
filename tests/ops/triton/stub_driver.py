"""Launch compiled kernels through a stub of CUDA's driver, on machines without a GPU: nothing is computed.

This needs a process whose Triton is not interpreted, and a C compiler, which Triton needs for itself. Tensors are on
the CPU. The work of the host is that of a launch on a GPU, except for the driver's own and for PyTorch's allocator.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Recorded(NamedTuple):
    """What the driver was told at a launch.

    Attributes:
        function: number of the compiled kernel.
        grid: number of programs along each axis.
        arguments: by name; an address is given as the name of its tensor, or "new" for other tensors.
    """

    function: int
    grid: tuple[int, ...]
    arguments: dict[str, int | str]


class StubDriver:
    """The stub, in place of the driver that Triton finds.

    Args:
        folder: where the stub is built.
        architecture: that of the GPU that it reports, for example 90 for sm_90.

    Attributes:
        device: index of the current device.
    """

    def __init__(self, folder: Path, architecture: int = 90) -> None:
        assert os.environ.get("TRITON_INTERPRET") != "1"
        library = folder / "libcuda.so.1"
        source = Path(__file__).with_name("stub_driver.c")
        command = ["gcc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        (folder / "libcuda.so").symlink_to(library)  # linked by older versions of Triton
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        self._stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.device = 0
        torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]  # absent without CUDA
        from triton.backends.nvidia.driver import CudaDriver
        from triton.runtime import driver

        from kvshift.ops.triton import call

        active: Any = CudaDriver()
        active.get_current_device = lambda: self.device
        active.get_current_stream = lambda device: 0
        active.get_device_capability = lambda device=0: divmod(architecture, 10)
        active.set_current_device = lambda device: None
        driver.set_active(active)
        call._IS_INTERPRETED = True  # the stub accepts tensors on the CPU

    def count(self) -> int:
        """Return the number of launches so far."""
        return ctypes.c_uint64.in_dll(self._stub, "stub_launches").value

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the driver is told at every launch; otherwise launches are only counted."""
        count = ctypes.c_uint.in_dll(self._stub, "stub_count")
        count.value = 48
        try:
            yield
        finally:
            count.value = 0

    def last(self, kernel: Any, tensors: dict[str, Tensor | None]) -> Recorded:
        """Return the last launch that was recorded, which must be one of `kernel`."""
        function = ctypes.c_uint64.in_dll(self._stub, "stub_function").value
        raw = (ctypes.c_uint64 * 48).in_dll(self._stub, "stub_parameters")
        compiled = [k for caches in kernel.device_caches.values() for k in caches[0].values() if k.function == function]
        assert len(compiled) == 1, f"the last launch was none of {kernel.fn.__name__}"
        names = {x.data_ptr(): name for name, x in tensors.items() if x is not None}
        types = zip(kernel.arg_names, compiled[0].src.signature.values(), strict=True)
        parameters = [(name, type_) for name, type_ in types if type_ != "constexpr"]
        arguments: dict[str, int | str] = {}
        for (name, type_), value in zip(parameters, raw, strict=False):
            if type_.startswith("*"):
                arguments[name] = names.get(value, "new")
            else:
                bits = int(type_[1:])
                value %= 1 << bits
                arguments[name] = value - (value >> (bits - 1) << bits)
        grid = tuple((ctypes.c_uint * 3).in_dll(self._stub, "stub_grid"))
        return Recorded(function, grid, arguments)
