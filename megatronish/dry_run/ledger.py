"""Ledger of storages: the bytes that are held at every moment, and what was held when they were most.

torch's own trackers know modules; here a storage has the phase of the step in which it was allocated, and the ledger is
replayed at the end: what was allocated before the phase of the peak and lives on waits for a backward, what comes and
goes within that phase is temporary.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

GRANULE = 512  # bytes, of torch's allocator on CUDA


class Allocation(NamedTuple):
    """A storage: the number of the phase that allocated it, by which operator and line, and the first tensor in it."""

    phase: int
    operator: str
    site: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Change(NamedTuple):
    """Bytes of a storage, by its number, are allocated or, below zero, freed, while a phase is at work."""

    number: int
    size: int
    phase: int


class Held(NamedTuple):
    """A storage that is held when most is: its bytes, and the number of the phase that freed it, if any did."""

    number: int
    size: int
    allocation: Allocation
    freed: int | None


@dataclass
class StorageLedger:
    """Storages on one type of device. `phases` are the names of all phases, the last one is at work."""

    device_type: str
    site: Callable[[], str]
    phases: list[str] = field(default_factory=lambda: ["start"])
    held: int = 0
    peak: int = 0
    _peak_at: int = 0  # number of changes that have led to the peak
    _allocations: list[Allocation] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _changes: list[Change] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)

    def begin(self, phase: str) -> None:
        """From now on another phase is at work."""
        self.phases.append(phase)

    def forget_peak(self) -> None:
        """The peak is looked for from now on."""
        self.peak, self._peak_at = self.held, len(self._changes)

    def note(self, tensor: torch.Tensor, operator: str) -> None:
        """A tensor that an operator has returned; its storage, if it is a new one, is allocated now."""
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self._numbers:
            return
        number = self._numbers[identity] = len(self._allocations)
        found = Allocation(len(self.phases) - 1, operator, self.site(), tuple(tensor.shape), tensor.dtype)
        self._allocations.append(found)
        self._sizes.append(0)
        self._resize(number, storage.nbytes())
        weakref.finalize(storage, self._freed, identity)

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage has another size from now on."""
        if storage._cdata in self._numbers:
            self._resize(self._numbers[storage._cdata], size)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Number of a tensor's storage."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def at_peak(self) -> list[Held]:
        """What was held when most was."""
        sizes: dict[int, int] = {}
        for change in self._changes[: self._peak_at]:
            sizes[change.number] = sizes.get(change.number, 0) + change.size
        freed: dict[int, int] = {}
        for change in self._changes[self._peak_at :]:
            if change.size < 0:
                freed.setdefault(change.number, change.phase)
        return [
            Held(number, size, self._allocations[number], freed.get(number)) for number, size in sizes.items() if size
        ]

    @property
    def peak_phase(self) -> int:
        """Number of the phase in which most was held."""
        return self._changes[self._peak_at - 1].phase if self._peak_at else 0

    def _freed(self, identity: int) -> None:
        self._resize(self._numbers.pop(identity), 0)

    def _resize(self, number: int, size: int) -> None:
        size = -(-size // GRANULE) * GRANULE
        change = size - self._sizes[number]
        if change:
            self._sizes[number] = size
            self._changes.append(Change(number, change, len(self.phases) - 1))
            self.held += change
            if self.held > self.peak:
                self.peak, self._peak_at = self.held, len(self._changes)
