"""Settings of libraries in the process of a rank: torch's determinism and flight recorder, glibc's freed memory.

glibc returns large blocks to the system when they are freed. Every step then gets them again page by page, each cleared
and mapped at its first use: a tenth of a step of a small model. The peak of memory stays about the same. Pages of 2 MiB
save two to three percent more: the processor keeps few translations of addresses, and a matrix has many pages of 4 KiB.

The flight recorder is a record of NCCL's collectives on the device, switched on before groups are made. Our own record
knows what the host has started; that of NCCL knows what the device has finished.
"""

import contextlib
import ctypes
import os
import resource
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

import torch

from megatronish.config.sections.training import TrainingConfig

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
MADV_HUGEPAGE, HUGE_PAGE = 14, 2**21  # sys/mman.h; bytes
MALLOC_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which users choose for themselves: then nothing is changed."""
STRICT = 2
"""Value of vm.overcommit_memory with which reserved addresses count as memory."""

# Each has an older name, which torch 2.11 may read instead. A variable that the user has set stays.
RECORDER_VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """From now on freed memory stays with the process; False where the user chose otherwise, or without glibc."""
    if any(name in environ for name in MALLOC_VARIABLES):
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


# cuBLAS and NCCL read these when they start: a workspace of its own for each stream, and one order of every sum.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def set_determinism(training: TrainingConfig) -> None:
    """Set torch's switches for --deterministic-mode and --disable-bf16-reduced-precision-matmul.

    With deterministic algorithms, torch's flash attention adds its gradients in one order, and an operation that has no
    deterministic kernel raises instead of computing. A variable that is set already is left as it is.
    """
    torch.use_deterministic_algorithms(training.deterministic_mode)
    if training.deterministic_mode:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        torch.backends.cudnn.benchmark = False
        # On by default, it writes NaN to whatever is allocated, once more over the memory, in case something reads
        # what it has not written. Nothing here does.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (
        not training.disable_bf16_reduced_precision_matmul
    )


def switch_on_flight_recorder(folder: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL keep its last 2,000 collectives, and write them to `folder` after a timeout."""
    for name, value in RECORDER_VARIABLES.items():
        environ.setdefault(name, value)
    for name in RECORDER_FILES:
        environ.setdefault(name, str(folder / "nccl_rank_"))


def dump_flight_record(path: Path) -> None:
    """Write this rank's record to a file, for torchfrtrace; nothing where torch has none."""
    distributed = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(distributed, name, None)
        if dump is None:
            continue
        with contextlib.suppress(Exception):  # the report matters more
            path.write_bytes(dump())
            return
