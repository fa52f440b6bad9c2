"""Freed memory of a process on the CPU: kept for the next step instead of returned to the system.

glibc returns large blocks to the system when they are freed. Every step then gets them again page by page, each cleared
and mapped at its first use: a tenth of a step of a small model. The peak of memory stays about the same.
"""

import ctypes
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which users choose for themselves: then nothing is changed."""


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """From now on freed memory stays with the process; False where the user chose otherwise, or without glibc."""
    if any(name in environ for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    # No block is a mapping of its own, and the heap is never cut back: -1 is the largest size.
    return mallopt(M_MMAP_MAX, 0) == 1 and mallopt(M_TRIM_THRESHOLD, -1) == 1
