"""Bytes on a device by what they are for, one pipeline stage or several, and their table."""

from collections.abc import Sequence
from typing import NamedTuple


class Memory(NamedTuple):
    """Bytes on one device, on its `host`, which is the CPU's memory, and on the `disk` of --offload-folder.

    `temporary` is what is whole for a part of a step: gradients of ZeRO-2 until they are exchanged, with ZeRO-3 the
    layers that were gathered and their gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    logits: int = 0
    temporary: int = 0
    host: int = 0
    disk: int = 0

    def plus(self, other: "Memory") -> "Memory":
        """Bytes of two groups of parameters together."""
        return Memory(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(self) - self.host - self.disk


def format_bytes(size: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def memory_table(stages: Sequence[Memory]) -> str:
    """A row for each stage, a column for each kind of bytes; what few runs have is there where there is any."""
    apart = ("host", "disk")
    optional = {"temporary", *apart}
    names = [name for name in Memory._fields if name not in optional or any(getattr(stage, name) for stage in stages)]
    names.insert(len(names) - sum(name in apart for name in names), "total")
    rows = [[f"stage {i}", *(format_bytes(getattr(stage, name)) for name in names)] for i, stage in enumerate(stages)]
    return "\n".join("".join(f"{cell:>12}" for cell in row).rstrip() for row in [["", *names], *rows])
