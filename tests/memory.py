"""Memory that a process has and does not use."""

from __future__ import annotations

import contextlib
import ctypes
import gc

M_MXFAST, M_TRIM_THRESHOLD, M_TOP_PAD = 1, -1, -2  # of glibc's malloc.h


def give_back() -> None:
    """Collects garbage, and lets the C library return what is free: glibc keeps it, gigabytes over all files."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another system's C library
        ctypes.CDLL(None).malloc_trim(0)


def keep_free_memory() -> None:
    """Has glibc keep what is freed within a file, and merge small pieces of it only where somebody needs a large one.

    XLA frees millions of small pieces a program, and each large one among them would walk all of those.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option, value in ((M_MXFAST, 0), (M_TRIM_THRESHOLD, 512 << 20), (M_TOP_PAD, 64 << 20)):
            libc.mallopt(option, value)
