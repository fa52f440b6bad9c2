"""Writing of a copy: each rank its file in its host's folder, its neighbour's file, and one decision for all.

A copy is a checkpoint whose files lie on several hosts. Every host has the small files, which say what the checkpoint
consists of; of the tensors it has the files of its own ranks and those that these keep for their neighbours.

    HOST 0: step_00000010/   .metadata state.json checksums.json   __0_0.distcp __1_0.distcp   (kept: __2_0 __3_0)
    HOST 1: step_00000010/   .metadata state.json checksums.json   __2_0.distcp __3_0.distcp   (kept: __0_0 __1_0)

It is written under a hidden name. Once every rank has what it writes and keeps, verified, the hosts rename it, and once
all have renamed it they remove the copy before it. So whenever a run is killed, one whole copy is there.

Files go to the neighbour over a process group of gloo, piece by piece. All ranks know the whole list of transfers. In
each round the next piece of every transfer is sent; a rank takes part in the rounds of its own transfers. It posts
everything that it receives and sends in a round before it waits, so no ring of ranks waits for itself.
"""

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from megatronish.checkpoint.checksums import CHECKSUMS, Checksums, DamagedError
from megatronish.checkpoint.folder import NAME, STATE, name_of, partial_name_of
from megatronish.checkpoint.metadata import METADATA
from megatronish.checkpoint.replicated.local import Hosts
from megatronish.checkpoint.tensors import GlobalTensor, write_tensors
from megatronish.core.errors import RunError
from megatronish.core.files import sync_folder, write_durably
from megatronish.parallel import comm
from megatronish.parallel.all_or_none import all_or_none, from_one
from megatronish.parallel.disk import extremes_of
from megatronish.parallel.mesh import Axis

SMALL = (METADATA, STATE, CHECKSUMS)
"""Files of which every host has its own."""


class Nearby(NamedTuple):
    """Local folder of this host, the hosts, and the process group of copies, which training does not use."""

    folder: Path
    hosts: Hosts
    axis: Axis


def write_copy(nearby: Nearby, *, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> Path:
    """Write the copy of step `step`, on all hosts or on none. All ranks call this, also in a thread each.

    RunError, on all ranks, if a disk or memory is full or a tensor is not finite; the copy before stays then.
    """
    folder, hosts, axis = nearby
    hidden, target = folder / partial_name_of(step), folder / name_of(step)
    try:
        write_tensors(hidden, tensors, over=axis)
        small = from_one(axis, partial(_describe, hidden, step, state))
        all_or_none(axis, partial(_complete, nearby, hidden, small, tensors))
        all_or_none(axis, partial(_rename, hidden, target) if hosts.is_first else lambda: None)
    except (OSError, DamagedError, RunError) as error:
        if hosts.is_first:
            shutil.rmtree(hidden, ignore_errors=True)
        why = error.why if isinstance(error, DamagedError) else getattr(error, "strerror", None) or error
        raise RunError(f"the state of step {step} was not copied to {folder}: {why}") from error
    if hosts.is_first:
        with suppress(OSError):  # all have agreed that the copy is whole: no rank may fail alone now
            remove_copies(folder, keep=target)
    return target


def _refuse_not_finite(tensors: dict[str, GlobalTensor]) -> None:
    """RunError for a parameter that is infinite or not a number: it must not replace one from which a run resumes."""
    for name, tensor in tensors.items():
        is_parameter = name.startswith("model.") and tensor.local.numel() and tensor.local.is_floating_point()
        if is_parameter and not bool(torch.isfinite(extremes_of(tensor.local.contiguous())).all()):
            raise RunError(f"{name} holds infinity or NaN")


def _describe(hidden: Path, step: int, state: dict[str, Any]) -> dict[str, bytes]:
    """Add state and checksums to the folder of the main rank, where tensors are written; its small files."""
    write_durably(hidden / STATE, json.dumps(state | {"step": step, "saved_at": time.time()}, indent=1))
    Checksums.read(hidden).with_other_files().write()
    return {name: (hidden / name).read_bytes() for name in SMALL}


def _complete(nearby: Nearby, hidden: Path, small: dict[str, bytes], tensors: dict[str, GlobalTensor]) -> None:
    """Send this rank's file to its neighbour, and keep and verify those of which this rank is the neighbour."""
    hosts, axis = nearby.hosts, nearby.axis
    files = Checksums.parse(hidden, small[CHECKSUMS]).files
    moved = []
    for rank in range(axis.size):
        name, keeper = f"__{rank}_0.distcp", hosts.keeper_of(rank)
        if keeper is not None and name in files:
            moved.append(Transfer(name, sum(span.length for span in files[name]), rank, keeper))
    move(moved, hidden, axis)
    if hosts.is_first:
        write_small(hidden, small)
    kept = {transfer.name: files[transfer.name] for transfer in moved if transfer.target == axis.rank}
    Checksums(hidden, kept).verify()
    _refuse_not_finite(tensors)


def write_small(folder: Path, small: dict[str, bytes]) -> None:
    """Write the small files of a copy, checksums.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SMALL:
        (folder / name).write_bytes(small[name])


def _rename(hidden: Path, target: Path) -> None:
    if target.exists():  # a run that went back makes the same step again
        shutil.rmtree(target)
    hidden.rename(target)
    sync_folder(target.parent)


def remove_copies(folder: Path, *, keep: Path | None = None) -> None:
    """Remove all copies of a host's folder, whole or not, except `keep`."""
    for path in folder.glob("*"):
        if path != keep and (NAME.fullmatch(path.name) or path.name.startswith(".step_")):
            shutil.rmtree(path, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Remove what a copy or a start that was killed has left in a host's folder."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".host_*"):
        with suppress(OSError):
            path.unlink()


PIECE_BYTES = 2**23


class Transfer(NamedTuple):
    """File of `length` bytes that rank `source` has and rank `target` gets, under the same name in its own folder."""

    name: str
    length: int
    source: int
    target: int


def move(transfers: Sequence[Transfer], folder: Path, axis: Axis) -> None:
    """Send and receive files of `folder`; every rank that is named by a transfer calls this with the same list.

    OSError if this rank could not read or write a file of its own: the caller must tell all ranks.
    """
    for error in failures_of(transfers, folder, axis).values():
        raise error


def failures_of(transfers: Sequence[Transfer], folder: Path, axis: Axis) -> dict[Transfer, OSError]:
    """Send and receive, as `move` does; errors of this rank by transfer.

    A rank that cannot read or write its file takes part to the end, so that no peer waits for it. What was received
    from it is wrong: only both ends know together whether a transfer has failed.
    """
    ends = [_End(transfer, tag, folder, axis) for tag, transfer in enumerate(transfers) if _is_mine(transfer, axis)]
    with ExitStack() as files:
        for end in ends:
            end.open(files)
        while active := [end for end in ends if end.has_more]:
            for work in [end.post() for end in active]:
                work.wait()
            for end in active:
                end.keep()
    return {end.transfer: end.error for end in ends if end.error is not None}


def _is_mine(transfer: Transfer, axis: Axis) -> bool:
    return axis.rank in (transfer.source, transfer.target) and transfer.source != transfer.target


class _End:
    """One end of a transfer: the sender reads pieces of its file, the receiver writes them."""

    def __init__(self, transfer: Transfer, tag: int, folder: Path, axis: Axis) -> None:
        self.transfer, self.tag, self.path, self.axis = transfer, tag, folder / transfer.name, axis
        self.sends = axis.rank == transfer.source
        self.error: OSError | None = None
        self._file: BinaryIO | None = None
        self._done = 0
        self._buffer = torch.zeros(min(PIECE_BYTES, transfer.length), dtype=torch.uint8)

    @property
    def has_more(self) -> bool:
        return self._done < self.transfer.length

    @property
    def _piece(self) -> Tensor:
        return self._buffer[: self.transfer.length - self._done]

    def open(self, files: ExitStack) -> None:
        try:
            self._file = files.enter_context(self.path.open("rb" if self.sends else "wb", buffering=0))
        except OSError as error:
            self.error = error

    def post(self) -> comm.Pending:
        """Start to send or to receive the next piece."""
        if self.sends:
            self._attempt()
            return comm.start_send(self._piece, self.axis, to=self.transfer.target, tag=self.tag)
        return comm.start_receive(self._piece, self.axis, source=self.transfer.source, tag=self.tag)

    def keep(self) -> None:
        """Take note of the piece that has been sent or received."""
        if not self.sends:
            self._attempt()
        self._done += self._piece.numel()

    def _attempt(self) -> None:
        """Read the next piece, or write it; after an error no more."""
        if self._file is None or self.error is not None:
            return
        data = memoryview(self._piece.numpy())  # type: ignore[arg-type]
        try:
            while data:
                count = (self._file.readinto if self.sends else self._file.write)(data)  # type: ignore[attr-defined]
                if not count:
                    raise OSError(f"{self.path} ends early")
                data = data[count:]
            if not self.sends and self._done + self._piece.numel() == self.transfer.length:
                os.fsync(self._file.fileno())
        except OSError as error:
            self.error = error
