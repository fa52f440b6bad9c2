"""Saving: the tensors of a checkpoint by their global names, and the steps in which the ranks write it.

Tensors are stored under global names, as fp32 masters, without the padding of the vocabulary. So a checkpoint depends
neither on the layout nor on the precision of the run that saved it:

    model.NAME                     the parameter
    optimizer.STATE.NAME           exp_avg, exp_avg_sq, ... of the same shape, as far as this parameter has them

With an outer optimizer (DiLoCo) `model.NAME` are the outer parameters, and what differs between islands is that of one:

    outer.momentum.NAME            of the outer step
    island.I.model.NAME            the parameter on island I, since the last outer step
    island.I.optimizer.STATE.NAME  its states

With --async-save a thread writes from a copy of this rank's tensors in host memory (`HostCopies`). Training waits only
for the copy to host memory. The thread reads no tensor of the training, and communicates with the other ranks' threads
over a process group that training does not use. At most one save runs at a time, so the threads of all ranks call the
same collectives in the same order, and the buffers of one save are free for the next one.
"""

import errno
import math
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatronish.checkpoint.checksums import DamagedError
from megatronish.checkpoint.folder import new_attempt, partial_name_of, publish, remove_attempt, remove_leftovers
from megatronish.checkpoint.tensors import GlobalTensor, write_tensors
from megatronish.core.errors import RunError
from megatronish.core.files import remedy_of_writing
from megatronish.core.remote import Location, RemotePath
from megatronish.optim.optimizer import Optimizer
from megatronish.parallel.all_or_none import from_one
from megatronish.parallel.disk import copy_between, disk_of, zeros_beside
from megatronish.parallel.mesh import Axis, Domain, Mesh
from megatronish.parallel.pinned import Form, pinned_zeros
from megatronish.parallel.sharding import FlatPiece, Piece, Shard, Sharding

ISLAND = "island."
"""Prefix of the names of what differs between islands (DiLoCo), before the number of one."""
MOMENTUM = "outer.momentum"


def model_tensors(
    shards: Mapping[str, Shard], shardings: Mapping[str, Sharding], domains: Mapping[str, Domain]
) -> dict[str, GlobalTensor]:
    """Parameters as global tensors. Of the ranks that hold replicas of a shard, each writes some of the tensors."""
    masters = {name: shard.master for name, shard in shards.items()}
    return global_tensors("model", masters, shards, shardings, domains)


def state_tensors(states: Mapping[str, Tensor], domain: Domain) -> dict[str, GlobalTensor]:
    """State of the model that no gradient changes (the biases of routers): whole on every rank, written by one."""
    writes = all(axis.is_first for axis in (*domain.counting_axes, domain.replicate, domain.islands))
    return {
        f"model.{name}": GlobalTensor(tuple(each.shape), (_whole(each),), each, writes=writes)
        for name, each in states.items()
    }


def _whole(tensor: Tensor) -> Piece:
    zeros = (0,) * tensor.dim()
    return Piece(zeros, zeros, tuple(tensor.shape))


def optimizer_tensors(
    optimizer: Optimizer, shardings: Mapping[str, Sharding], domains: Mapping[str, Domain], *, island: str = ""
) -> dict[str, GlobalTensor]:
    """Optimizer states as global tensors of their parameters' shapes; with `island` those of this rank's, named so."""
    states: dict[str, GlobalTensor] = {}
    # Per state and not per parameter, as parameters may have different ones (Muon's momentum, Adam's moments).
    for state in dict.fromkeys(state for tensors in optimizer.state.values() for state in tensors):
        tensors = {name: tensors[state] for name, tensors in optimizer.state.items() if state in tensors}
        states |= global_tensors(
            f"{island}optimizer.{state}", tensors, optimizer.shards, shardings, domains, of_island=bool(island)
        )
    return states


def global_tensors(
    prefix: str,
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, Shard],
    shardings: Mapping[str, Sharding],
    domains: Mapping[str, Domain],
    *,
    of_island: bool = False,
) -> dict[str, GlobalTensor]:
    """Global tensors by `prefix`.NAME; the replicas of a shard take turns in writing, so that they share the work.

    Ranks in the same place of other islands hold a replica, too, except of what is `of_island`.
    """
    result = {}
    for number, (name, local) in enumerate(tensors.items()):
        sharding = shardings[name]
        domain = domains[sharding.domain]
        # Tensor by tensor in the same order on all replicas, so each tensor has exactly one writer among them.
        replicate, islands = domain.replicate, Axis("islands") if of_island else domain.islands
        turn = number % (replicate.size * islands.size)
        is_turn = turn == islands.rank * replicate.size + replicate.rank
        result[f"{prefix}.{name}"] = GlobalTensor(
            shape=sharding.shape,
            pieces=tuple(_by_matrix(shards[name].pieces)),
            local=local.detach(),
            writes=sharding.is_counted(domain) and is_turn,
        )
    return result


def _by_matrix(pieces: Iterable[Piece | FlatPiece]) -> Iterator[Piece | FlatPiece]:
    """Pieces of a stack of matrices (experts) apart for each index of its first dim; pieces of a matrix as they are.

    What is stored is then one rectangle for each expert, and a reader of one expert reads no other.
    """
    for piece in pieces:
        if len(piece.sizes) < 3:
            yield piece
            continue
        (first, *others), sizes = piece.global_offset, (1, *piece.sizes[1:])
        for row in range(piece.sizes[0]):
            offset = (first + row, *others)
            if isinstance(piece, FlatPiece):
                yield FlatPiece(offset, piece.start + row * math.prod(sizes), sizes)
            else:
                yield Piece(offset, (piece.local_offset[0] + row, *piece.local_offset[1:]), sizes)


class SaveError(RunError):
    """RunError: a checkpoint could not be written. `what` is the failure, `remedy` the advice to the user."""

    def __init__(self, what: str, remedy: str = "free space there") -> None:
        super().__init__(
            f"{what}. Those before it are whole; {remedy} and start again, or name another place with --save"
        )
        self.what, self.remedy = what, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickling by its two parts, for other ranks: the default would pass the whole sentence as `what`."""
        return SaveError, (self.what, self.remedy)


def save_checkpoint(
    folder: Location,
    *,
    step: int,
    tensors: dict[str, GlobalTensor],
    state: dict[str, Any],
    mesh: Mesh,
    makes_folder: bool = True,
) -> Location:
    """Write a checkpoint of step `step` into `folder`, whole or not at all. All ranks call this; returns its path.

    A run has its folder locked, so it passes `makes_folder` False: one that was moved away is not made again.

    SaveError, on all ranks, if the disk is full or fails: what was written is removed, and the checkpoints before it
    stay. Ranks communicate over `mesh.checkpoint_axis` alone, so a thread may call this while training uses the other
    process groups.
    """
    axis, partial = mesh.checkpoint_axis, None
    try:
        # 1. One rank makes the folder, all ranks write into it; an error of any rank is raised on all.
        partial = folder / from_one(axis, lambda: _begin(folder, step, makes_folder=makes_folder))
        write_tensors(partial, tensors, over=axis)
        # 2. Only when all ranks have written: until then no folder of a checkpoint's name exists.
        return folder / from_one(axis, lambda: publish(partial, step=step, state=state).name)
    except (OSError, DamagedError) as error:
        # No rank writes any more: the error has come to all of them together.
        if mesh.is_main and partial is not None:
            _remove(partial)
        what = f"the checkpoint of step {step} could not be written to {folder}"
        if isinstance(error, DamagedError):  # the main rank does not see what another has written
            raise SaveError(f"{what}: {error.why}", "let all ranks see one folder") from error
        place = folder if isinstance(folder, Path) else None
        raise SaveError(f"{what}: {error.strerror or error}", remedy_of_writing(error, place)) from error


def _begin(folder: Location, step: int, *, makes_folder: bool) -> str:
    """Name of the folder to write the checkpoint of the step into; what killed saves have left is removed."""
    # The number of an attempt follows those that are there, incomplete ones included: it is chosen before they are
    # removed.
    if isinstance(folder, RemotePath):
        attempt = new_attempt(folder, step)
        remove_leftovers(folder)
        return attempt.name
    if makes_folder:
        folder.mkdir(parents=True, exist_ok=True)
    # A moved folder is an error: a new one would lack the checkpoints before this one.
    elif not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "it was moved or removed while the run was in it; move it back")
    remove_leftovers(folder)
    partial = folder / partial_name_of(step)
    partial.mkdir()
    return partial.name


def _remove(partial: Location) -> None:
    """Remove what a failed save has written, as far as that is possible; the next save removes the rest."""
    if isinstance(partial, RemotePath):
        with suppress(OSError):
            remove_attempt(partial)
    else:
        shutil.rmtree(partial, ignore_errors=True)


T = TypeVar("T")


class HostCopies:
    """Buffers for the tensors that this rank writes, reused by every save.

    They are in host memory, pinned for GPU tensors; for tensors on a disk they are there.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, tensors: dict[str, GlobalTensor]) -> dict[str, GlobalTensor]:
        """Copies of the tensors that this rank writes. They overwrite the copies of the call before."""
        written = {name: tensor for name, tensor in tensors.items() if tensor.writes}
        self._make([(name, each.local) for name, each in written.items() if name not in self._buffers])
        copies = {
            name: replace(tensor, local=self._filled(self._buffers[name], tensor.local))
            for name, tensor in written.items()
        }
        # Copies from a GPU are asynchronous: training may change the tensors only after they are complete.
        if any(tensor.local.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return copies

    @staticmethod
    def _filled(buffer: Tensor, tensor: Tensor) -> Tensor:
        if disk_of(tensor) is None:
            return buffer.copy_(tensor, non_blocking=True)
        copy_between([(buffer, tensor)])
        return buffer

    def _make(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Make buffers, those for GPU tensors together."""
        forms = {name: Form(tuple(each.shape), each.dtype) for name, each in tensors if each.is_cuda}
        self._buffers |= dict(zip(forms, pinned_zeros(list(forms.values())), strict=True))
        on_cpu = [(name, each) for name, each in tensors if not each.is_cuda]
        in_files = [(name, each) for name, each in on_cpu if disk_of(each) is not None]
        self._buffers |= {
            name: torch.empty(each.shape, dtype=each.dtype) for name, each in on_cpu if disk_of(each) is None
        }
        zeros = zeros_beside([each for _, each in in_files])
        self._buffers |= {name: buffer for (name, _), buffer in zip(in_files, zeros, strict=True)}


def in_background(work: Callable[[], T]) -> Future[T]:
    """Future of `work`, which runs in a daemon thread: it does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()
    return future
