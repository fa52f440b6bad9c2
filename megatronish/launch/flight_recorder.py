"""Flight recorder of torch: a record of NCCL's collectives on the device, switched on before groups are made.

Our own record knows what the host has started; that of NCCL knows what the device has finished.
"""

import contextlib
import os
from collections.abc import MutableMapping
from pathlib import Path

import torch

# Each has an older name, which torch 2.11 may read instead. A variable that the user has set stays.
_VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def switch_on_flight_recorder(folder: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL keep its last 2,000 collectives, and write them to `folder` after a timeout."""
    for name, value in _VARIABLES.items():
        environ.setdefault(name, value)
    for name in _FILES:
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
