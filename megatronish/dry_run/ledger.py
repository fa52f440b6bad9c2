"""Ledger of storages: the bytes that are held at every moment, and what was held when they were most.

torch's own trackers know modules; here a storage has the phase of the step in which it was allocated, and the ledger is
replayed at the end to find what each one was for.
"""

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

GRANULE = 512  # bytes, of torch's allocator on CUDA


class Allocation(NamedTuple):
    """A storage: its size, the phase of its allocation (a number that rises), and the operator and shape."""

    size: int
    phase: int
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Change(NamedTuple):
    """Bytes of a storage are allocated or, below zero, freed, while a phase is at work."""

    key: int
    size: int
    phase: int


@dataclass
class Ledger:
    """Storages on one type of device. `phases` are the names of all phases, the last one at work."""

    device_type: str
    phases: list[str] = field(default_factory=lambda: ["start"])
    allocations: list[Allocation] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    held: int = 0
    peak: int = 0
    peak_at: int = 0  # number of changes that have led to the peak
    _key_of: dict[int, int] = field(default_factory=dict)

    def begin(self, phase: str) -> None:
        """From now on another phase is at work."""
        self.phases.append(phase)

    def note(self, tensor: torch.Tensor, operator: str) -> None:
        """A tensor that an operator has returned; its storage is allocated now if it is a new one."""
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self._key_of:
            return
        key = self._key_of[identity] = len(self.allocations)
        phase = len(self.phases) - 1
        size = rounded(storage.nbytes())
        self.allocations.append(Allocation(size, phase, operator, tuple(tensor.shape), tensor.dtype))
        self._change(key, size)
        weakref.finalize(storage, self._freed, identity)

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage has another size from now on."""
        key = self._key_of.get(storage._cdata)
        if key is not None:
            before = self._size_of(key)
            if rounded(size) != before:
                self._sizes[key] = rounded(size)
                self._change(key, rounded(size) - before)

    _sizes: dict[int, int] = field(default_factory=dict)

    def key_of(self, tensor: torch.Tensor) -> int | None:
        """Number of a tensor's allocation."""
        return self._key_of.get(tensor.untyped_storage()._cdata)

    def _size_of(self, key: int) -> int:
        return self._sizes.get(key, self.allocations[key].size)

    def _freed(self, identity: int) -> None:
        key = self._key_of.pop(identity)
        self._change(key, -self._size_of(key))

    def _change(self, key: int, size: int) -> None:
        self.changes.append(Change(key, size, len(self.phases) - 1))
        self.held += size
        if self.held > self.peak:
            self.peak, self.peak_at = self.held, len(self.changes)

    def at_peak(self) -> Counter[int]:
        """{number of an allocation: bytes} when most was held."""
        held: Counter[int] = Counter()
        for change in self.changes[: self.peak_at]:
            held[change.key] += change.size
        return +held


def rounded(size: int) -> int:
    """Bytes that the allocator takes for so many."""
    return -(-size // GRANULE) * GRANULE
