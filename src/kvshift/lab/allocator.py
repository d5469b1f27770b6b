"""What the C library does with freed memory."""

from __future__ import annotations

import ctypes


def keep_memory() -> bool:
    """Have the C library keep freed memory, as the allocators do that PyTorch recommends for a CPU.

    glibc hands large blocks back to the system at once, and taking new pages costs more than many an operation on them.

    Returns:
        Whether it will: False where it is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(mmap_threshold, 2**30) and mallopt(trim_threshold, 2**31 - 1))
