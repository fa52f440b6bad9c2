"""Owners of the bytes that a rank holds when it holds most: model state by its tensors, the rest by when it lives."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatronish.dry_run.ledger import Held, StorageLedger
from megatronish.engine.engine import Engine

OWNERS = ("weights", "gradients", "optimizer", "activations", "logits", "in flight", "temporary")
TRANSFERS = "parallel/pipeline/executor.py"
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
            owner: {number for each in found if (number := ledger.number_of(each)) is not None}
            for owner, found in _state(engine).items()
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
        if allocation.site.startswith(TRANSFERS):
            return "in flight"
        lives_on = held.freed is None or held.freed > phase
        return "activations" if allocation.phase < phase or lives_on else "temporary"

    def by_owner(self, ledger: StorageLedger) -> dict[str, int]:
        """Bytes of each owner when most was held."""
        found = dict.fromkeys(OWNERS, 0)
        for held in ledger.at_peak():
            found[self.owner_of(held, ledger.peak_phase)] += held.size
        return found

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
    counted = [each for found in data_parallel.counted_gradients().values() for each in found]
    moments = [each for state in optimizer.state.values() for each in state.values()]
    return {
        "weights": [*_weights(engine), *references],
        "gradients": [*data_parallel.gradients.values(), *data_parallel.sums.values(), *counted],
        "optimizer": [*(shard.master for shard in data_parallel.shards.values()), *moments],
    }


def _weights(engine: Engine) -> list[Tensor]:
    model = engine.stage.model
    return list(_local([*model.parameters(), *model.buffers()]))


def _local(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for each in tensors:
        yield each._local_tensor if isinstance(each, DTensor) else each
