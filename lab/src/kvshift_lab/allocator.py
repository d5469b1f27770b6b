"""How the C library treats freed memory."""

from __future__ import annotations

import ctypes


def retain_freed_memory() -> bool:
    """Make the C library keep freed memory, like the allocators that PyTorch recommends for CPUs.

    glibc returns large blocks to the system immediately, and mapping new pages costs more than many operations on them.

    Returns:
        True if the setting took effect; False if the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(mmap_threshold, 2**30) and mallopt(trim_threshold, 2**31 - 1))
