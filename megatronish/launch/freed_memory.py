"""Freed memory of a process on the CPU: kept for the next step instead of returned to the system, and in huge pages.

glibc returns large blocks to the system when they are freed. Every step then gets them again page by page, each cleared
and mapped at its first use: a tenth of a step of a small model. The peak of memory stays about the same. Pages of 2 MiB
save two to three percent more: the processor keeps few translations of addresses, and a matrix has many pages of 4 KiB.
"""

import ctypes
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
MADV_HUGEPAGE, HUGE_PAGE = 14, 2**21  # sys/mman.h; bytes
VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which users choose for themselves: then nothing is changed."""
STRICT = 2
"""Value of vm.overcommit_memory with which reserved addresses count as memory."""


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """From now on freed memory stays with the process; False where the user chose otherwise, or without glibc."""
    if any(name in environ for name in VARIABLES):
        return False
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    # No block is a mapping of its own, and the heap is never cut back: -1 is the largest size.
    if mallopt(M_MMAP_MAX, 0) != 1 or mallopt(M_TRIM_THRESHOLD, -1) != 1:
        return False
    if _may_reserve():
        with suppress(AttributeError, OSError, ValueError):
            _advise_huge_pages(libc, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return True


def _may_reserve() -> bool:
    """Whether addresses cost nothing until they are used."""
    if any(
        resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    ):
        return False
    try:
        return int(Path("/proc/sys/vm/overcommit_memory").read_text()) != STRICT
    except (OSError, ValueError):
        return False


def _advise_huge_pages(libc: ctypes.CDLL, size: int) -> bool:
    """Ask for huge pages in the next `size` bytes of the heap. They are reserved, and get memory when they are used."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.malloc(size)  # grows the heap, which then is not cut back
    if not start:
        return False
    end = libc.sbrk(0)
    libc.free(start)
    if not end or start + size > end:  # a mapping, which is gone now, or another allocator
        return False
    first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, (start + size) // HUGE_PAGE * HUGE_PAGE
    return bool(libc.madvise(first, last - first, MADV_HUGEPAGE) == 0)
