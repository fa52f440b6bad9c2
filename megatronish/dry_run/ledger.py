"""Ledger of storages: the bytes that are held at every moment, what was held when they were most, and by what.

torch's own trackers know modules; here a storage has the phase of the step in which it was allocated, and the ledger is
replayed at the end: what was allocated before the phase of the peak and lives on waits for a backward, what comes and
goes within that phase is temporary.
"""

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatronish.engine.engine import Engine

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
        allocation = Allocation(len(self.phases) - 1, operator, self.site(), tuple(tensor.shape), tensor.dtype)
        self._allocations.append(allocation)
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


OWNERS = ("weights", "gradients", "optimizer", "activations", "logits", "in flight", "temporary")
TRANSFERS = re.compile(r"parallel/pipeline/executor\.py:\d+ (empty_slice|slice_of|whole|post|take|send)")
"""Lines that make what is sent between stages."""
NUM_LARGEST = 8


class Group(NamedTuple):
    """Storages of one owner that the same operator of the same line has made in one shape."""

    owner: str
    made_by: str
    shape: str


@dataclass
class Owners:
    """Model state of an engine by the numbers of its storages. `logits_size` is the last dim of logits on this rank."""

    weights: set[int]
    gradients: set[int]
    optimizer: set[int]
    logits_size: int

    @classmethod
    def of(cls, engine: Engine, ledger: StorageLedger) -> "Owners":
        """What an engine holds before its first step."""
        numbers = {
            owner: {number for tensor in tensors if (number := ledger.number_of(tensor)) is not None}
            for owner, tensors in _state(engine).items()
        }
        numbers["optimizer"] -= numbers["weights"]  # masters of an fp32 model are its weights
        model = engine.stage.model
        size = model.config.padded_vocab_size(model.vocab_size, model.tp.axis.size) // model.tp.axis.size
        return cls(**numbers, logits_size=size)

    def owner_of(self, held: Held, phase: int) -> str:
        """Owner of a storage while a phase is at work."""
        for owner in ("weights", "gradients", "optimizer"):
            if held.number in getattr(self, owner):
                return owner
        allocation = held.allocation
        if allocation.shape[-1:] == (self.logits_size,) and len(allocation.shape) > 1:
            return "logits"
        if TRANSFERS.fullmatch(allocation.site):
            return "in flight"
        lives_on = held.freed is None or held.freed > phase
        return "activations" if allocation.phase < phase or lives_on else "temporary"

    def by_owner(self, ledger: StorageLedger) -> dict[str, int]:
        """Bytes of each owner when most was held."""
        size_by_owner = dict.fromkeys(OWNERS, 0)
        for held in ledger.at_peak():
            size_by_owner[self.owner_of(held, ledger.peak_phase)] += held.size
        return size_by_owner

    def largest(self, ledger: StorageLedger) -> list[tuple[Group, int, int]]:
        """(group, number of storages, bytes) of the largest groups besides model state."""
        sizes, numbers = Counter[Group](), Counter[Group]()
        for held in ledger.at_peak():
            owner, made = self.owner_of(held, ledger.peak_phase), held.allocation
            if owner not in OWNERS[:3]:
                dtype = str(made.dtype).removeprefix("torch.")
                group = Group(owner, f"{made.operator}, {made.site}", f"{dtype} {list(made.shape)}")
                sizes[group] += held.size
                numbers[group] += 1
        return [(group, numbers[group], size) for group, size in sizes.most_common(NUM_LARGEST)]


def _state(engine: Engine) -> dict[str, list[Tensor]]:
    data_parallel, optimizer = engine.data_parallel, engine.optimizer
    references = [] if engine.reference is None else _weights(engine.reference)
    counted = [tensor for tensors in data_parallel.counted_gradients().values() for tensor in tensors]
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    if engine.outer is not None:
        moments += [tensor for state in engine.outer.state.values() for tensor in state]
    return {
        "weights": [*_weights(engine), *references],
        "gradients": [*data_parallel.gradients.values(), *data_parallel.sums.values(), *counted],
        "optimizer": [*(shard.master for shard in data_parallel.shards.values()), *moments],
    }


def _weights(engine: Engine) -> list[Tensor]:
    model = engine.stage.model
    return list(_local([*model.parameters(), *model.buffers()]))


def _local(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield tensor._local_tensor if isinstance(tensor, DTensor) else tensor
