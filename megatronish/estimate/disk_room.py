"""Room on a local disk for what is offloaded to it (--offload-folder), found out before any rank starts.

A folder that is no local disk is refused: one in memory gains nothing, and over a network every page that is touched
waits for a server, whose failure ends a rank with a signal instead of an error.
"""

import errno
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatronish.config.config import Config
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.errors import UserError
from megatronish.core.files import remedy_of_writing
from megatronish.core.layout import Layout
from megatronish.estimate.costs.layout_costs import LayoutCosts, memory_of_stages
from megatronish.estimate.costs.memory_table import Memory, format_bytes
from megatronish.estimate.planner.devices import Device, device_of
from megatronish.launch.place import Place, place_from_environment

MOUNTS = Path("/proc/mounts")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
OVER_NETWORK = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "mmfs", "ncpfs", "nfs"),
    *("nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"),
)


def file_system_of(folder: Path, mounts: Path = MOUNTS) -> str:
    """Type of the file system that an absolute path is on, by the last of the mounts that lead to it; "" if unknown."""
    longest, kind = -1, ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        words = line.split(" ")
        if len(words) < 3:
            continue
        where = words[1].encode().decode("unicode_escape").encode("latin-1").decode()  # a blank is written as \040
        if folder.is_relative_to(where) and len(where) >= longest:
            longest, kind = len(where), words[2]
    return kind


def refuse_offload_folder(config: Config) -> None:
    """Make the folder of --offload-folder if it is not there; UserError if it cannot hold what is offloaded."""
    if config.parallel.offload_folder is None:
        return
    folder = Path(os.path.realpath(config.parallel.offload_folder))
    said = f"--offload-folder {config.parallel.offload_folder}"
    if sys.platform != "linux":
        raise UserError(f"{said} needs calls of Linux that {sys.platform} lacks; leave it out")
    kind = file_system_of(folder)
    if kind in IN_MEMORY:
        raise UserError(f"{said} is on {kind}, which is memory and no disk; name a folder on a local disk (NVMe)")
    if kind in OVER_NETWORK or kind.startswith("fuse."):
        raise UserError(
            f"{said} is on {kind}, a file system over a network or of a program, which is read page by page in every "
            "step; name a folder on a local disk (NVMe)"
        )
    _refuse_unwritable(folder, said)
    # Where the vocabulary is not known before a tokenizer is read, it is left out.
    memory = memory_of_stages(config, vocab_size=config.data.vocab_size or 1)
    needs, ranks = bytes_on_this_machine(memory, config.layout, place_from_environment())
    copies = int(config.checkpoint.async_save) + (config.checkpoint.save_replicated_interval is not None)
    needs *= 1 + copies
    also = " with their copies for saves in the background" if copies else ""
    file_system = os.statvfs(folder)
    has = file_system.f_bavail * file_system.f_frsize
    if needs > has:
        raise UserError(
            f"{said} has {format_bytes(has)} free, and the {ranks} rank{'s' if ranks > 1 else ''} of this machine "
            f"keep{'' if ranks > 1 else 's'} {format_bytes(needs)} of masters and optimizer states{also} there; free "
            f"{format_bytes(needs - has)}, name a larger disk, or use more machines"
        )


def _refuse_unwritable(folder: Path, said: str) -> None:
    """UserError if no file can be made in the folder."""
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{said} is a file, and no folder; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        try:  # not os.access: a file system that is mounted to be read refuses what its modes allow
            os.close(os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        why = error.strerror or str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = remedy_of_writing(error, folder) if full else "make it writable"
        raise UserError(f"{said} cannot be written: {why}; {remedy}, or name another folder") from error


def disk_lines(
    costs: LayoutCosts, parallel: ParallelConfig, *, num_microbatches: int, device: str, place: Place | None
) -> list[str]:
    """What of the ranks of this machine lies on its disk, and the seconds that a step waits for it at most."""
    if parallel.offload_folder is None:
        return []
    on_disk, ranks = bytes_on_this_machine(costs.memory, parallel.layout, place)
    a_step = on_disk / costs.disk.held * (costs.disk.step + num_microbatches * costs.disk.pass_read)
    known = device_of(device)
    rate = Device.nvme_gb_s if known is None else known.nvme_gb_s
    return [
        f"on the disk of {parallel.offload_folder}: {format_bytes(on_disk)} of {ranks} "
        f"rank{'s' if ranks > 1 else ''} of this machine; a step reads and writes {format_bytes(a_step)}, "
        f"{a_step / (1e9 * rate):.2g} s at {rate:g} GB/s"
    ]


def bytes_on_this_machine(memory: Sequence[Memory], layout: Layout, place: Place | None) -> tuple[int, int]:
    """Bytes on the disk of this machine, and of how many ranks: those with this process, or all on a plain start.

    `memory` is that of each stage.
    """
    world, first, number = layout.world_size, 0, layout.world_size
    if place is not None:
        first, number = place.rank - place.local_rank, place.local_world_size
    stages = Counter(layout.coordinates(rank).pp for rank in range(first, min(first + number, world)))
    return sum(memory[stage].disk * ranks for stage, ranks in stages.items()), stages.total()
