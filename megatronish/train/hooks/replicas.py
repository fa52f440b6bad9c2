"""The CheckReplicas hook: comparison of the parameters that several ranks hold alike, bit by bit.

Copies are computed, not sent: each data rank makes the same update from the same gradient, each tp rank that of what no
rank cuts. A bit that flips in one of them (memory, a bad core, a wrong kernel) stays, as nothing compares; the copies
drift apart, and checkpoints, for which copies take turns, mix them. So every few steps, and before each checkpoint, a
hash of every parameter is compared over its copies: one pass over the memory, and two small all-reduces an axis.
Islands (DiLoCo) differ between two outer steps, and have outer parameters, their momentum and what is frozen alike.

`torch.hash_tensor` is the XOR of the elements' bits: any single flipped bit changes it.

A rank whose hashes fail says so to all in the all-reduce that ends every comparison: then all of them compare no more.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.core.aside import Aside
from megatronish.core.errors import WholeRunError
from megatronish.engine.engine import Engine
from megatronish.parallel import comm
from megatronish.parallel.all_or_none import from_all
from megatronish.parallel.data_parallel.fully_sharded import held
from megatronish.parallel.disk import pieces_of
from megatronish.parallel.mesh import Axis
from megatronish.train.hooks.stop import Stopper
from megatronish.train.trainer import Hook, StepRecord, Trainer

NAMED = 3
"""Parameters that the error names."""


class Copies(NamedTuple):
    """Tensors of this rank, by name, of which every rank of the axis holds a copy."""

    axis: Axis
    tensors: dict[str, Tensor]


class Hashes(NamedTuple):
    """Hashes of copies, [tensors], on the device that the axis communicates on."""

    axis: Axis
    names: list[str]
    values: Tensor


class CheckReplicas(Hook):
    """WholeRunError if copies differ: checked every `interval` steps, and wherever a checkpoint is due."""

    def __init__(self, *, interval: int, save_interval: int | None, stopper: Stopper) -> None:
        self.interval, self.save_interval, self.stopper = interval, save_interval, stopper
        self._sound_step = 0
        self._aside = Aside("the comparison of replicas")

    def start(self, trainer: Trainer) -> None:
        """Take what was loaded as sound: its checksums were compared."""
        self._sound_step = trainer.progress.step

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Compare, at the interval or because a checkpoint follows."""
        intervals = [each for each in (self.interval, self.save_interval) if each is not None]
        if self.stopper.save_now or any(record.step % each == 0 for each in intervals):
            self.check(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Compare what the last checkpoint will hold."""
        if trainer.progress.step != self._sound_step:
            self.check(trainer)

    def check(self, trainer: Trainer) -> None:
        """Compare now; WholeRunError if copies differ. Collective, until it is left out on all ranks."""
        step = trainer.progress.step
        if self._aside.is_off:
            return
        mismatches = differences(trainer.engine, self._aside)
        if mismatches:
            more = f" and {len(mismatches) - NAMED} more" if len(mismatches) > NAMED else ""
            told = "; ".join(mismatches[:NAMED]) + more
            raise WholeRunError(
                f"ranks that should hold the same parameters do not after step {step}: {told}. They were the same "
                f"after step {self._sound_step}. Nothing was saved; start again from the newest checkpoint, and if the "
                "same ranks differ again, leave their machine out: its memory or its device is at fault"
            )
        self._sound_step = step


def differences(engine: Engine, aside: Aside | None = None) -> list[str]:
    """What differs, a phrase for each parameter, the same on every rank. Collective.

    With `aside`, hashes that cannot be computed raise nothing: all ranks step aside together.
    """
    engine.data_parallel.wait_for_parameters()
    world, hashes = engine.mesh.world, list[Hashes]()
    with nullcontext() if aside is None else aside.guard():
        hashes = [hashes_of(copies, engine.mesh.device) for copies in copies_of(engine)]
    if aside is not None and _max(float(aside.is_off), world, engine.mesh.device):
        aside.step("it failed on another rank, whose log says why", tells=engine.mesh.is_main)
        return []
    mine = [phrase for each in hashes for phrase in _compare(each)]
    if not _max(float(len(mine)), world, engine.mesh.device):
        return []
    return list(dict.fromkeys(phrase for phrases in from_all(world, lambda: mine) for phrase in phrases))


def _max(value: float, axis: Axis, device: torch.device) -> float:
    return float(comm.all_reduce(torch.tensor(value, device=device), axis, "max"))


def copies_of(engine: Engine) -> Iterator[Copies]:
    """What this rank holds that others should hold, too, by the axis of these ranks, in one order on all ranks.

    Parameters are copied over the data ranks, and over every model axis that does not cut them; those that lie sharded
    (ZeRO-3) over `replicate` alone. Masters are copied over `replicate`. What no island moves by itself is copied over
    `islands`.
    """
    mesh, shardings = engine.mesh, engine.stage.shardings
    parameters = dict(engine.stage.model.named_parameters())
    for name, domain in mesh.domains.items():
        own = {key: each.detach() for key, each in parameters.items() if shardings[key].domain == name}
        whole = {key: each for key, each in own.items() if held(each) is each}
        here = {key: held(each) for key, each in own.items()}
        masters = {
            f"master of {key}": shard.master.detach()
            for key, shard in engine.data_parallel.shards.items()
            if shardings[key].domain == name and shard.master.numel() and shard.master.is_floating_point()
        }
        yield Copies(domain.replicate, here | masters)
        yield Copies(domain.shard, whole)
        frozen = {key: each for key, each in here.items() if not parameters[key].requires_grad}
        yield Copies(domain.islands, frozen | _of_outer_step(engine, domain=name))
        for axis in domain.model.values():
            yield Copies(axis, {key: each for key, each in here.items() if axis.name not in shardings[key].cut_axes})
        for tied, axis in domain.holders.items():
            yield Copies(axis, {key: each for key, each in whole.items() if shardings[key].tied == tied})


def _of_outer_step(engine: Engine, *, domain: str) -> dict[str, Tensor]:
    """The state of the outer step, of which every island has a copy."""
    return {
        f"outer {what} of {key}": tensor
        for key, both in ({} if engine.outer is None else engine.outer.state).items()
        if engine.stage.shardings[key].domain == domain and both.parameter.numel()
        for what, tensor in both._asdict().items()
    }


def hashes_of(copies: Copies, device: torch.device) -> Hashes:
    """A hash of each of these tensors; none where no other rank has a copy."""
    tensors = {} if copies.axis.size == 1 else copies.tensors
    hashes = [_hash(each).to(device) for each in tensors.values()]
    return Hashes(copies.axis, list(tensors), torch.stack(hashes) if hashes else torch.empty(0, dtype=torch.int64))


def _compare(hashes: Hashes) -> list[str]:
    """Which of these tensors differ over the axis, and on which ranks."""
    axis, tensors, values = hashes
    if not tensors:
        return []
    # The largest and, of the complements, the smallest: equal on all ranks if the two are complements.
    extremes = comm.all_reduce(torch.stack((values, ~values)), axis, "max")
    differ = (extremes[0] != ~extremes[1]).cpu()
    if not bool(differ.any()):
        return []
    everybody = comm.start_all_gather(values.view(1, -1), axis).wait().cpu()  # [ranks, tensors]
    names = [name for name, is_other in zip(tensors, differ.tolist(), strict=True) if is_other]
    columns = everybody[:, differ].t().tolist()
    return [_told(name, column, axis) for name, column in zip(names, columns, strict=True)]


def _hash(tensor: Tensor) -> Tensor:
    """A number of 64 bits, in which any one flipped bit shows. Copies, of one shape, are read in words of one width.

    ZeRO-3 leaves ranks without a row of a small parameter: the hash of nothing is 0. A share may begin at any element,
    and torch reads no words of 8 bytes from there: it is copied.
    """
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    sizes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    width = next(each for each in sizes if tensor.nbytes % each == 0)
    hashes = list[Tensor]()
    for piece in pieces_of(tensor.contiguous()):
        bits = piece.view(torch.uint8)
        if bits.storage_offset() % width:
            bits = bits.clone()
        hashes.append(torch.hash_tensor(bits.view(sizes[width])).view(torch.int64))
    return reduce(torch.bitwise_xor, hashes)


def _told(name: str, hashes: Sequence[int], axis: Axis) -> str:
    """`norm.weight on rank 3 (of ranks 0, 1, 2, 3 of data)`: those in the minority, or all if there is none."""
    counts = {value: hashes.count(value) for value in hashes}
    most = max(counts, key=lambda value: counts[value])
    others = [rank for rank, value in zip(axis.ranks, hashes, strict=True) if value != most]
    everyone = ", ".join(map(str, axis.ranks))
    if 2 * counts[most] <= len(hashes):
        return f"{name} differs between the ranks {everyone} of {axis.name}"
    where = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    return f"{name} differs on {where} from what most of the ranks {everyone} of {axis.name} hold"
