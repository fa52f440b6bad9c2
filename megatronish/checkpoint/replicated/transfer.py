"""Transfers of files between the local folders of ranks, over a process group of gloo, piece by piece.

All ranks know the whole list of transfers. In each round the next piece of every transfer is sent; a rank takes part in
the rounds of its own transfers. It posts everything that it receives and sends in a round before it waits, so no ring
of ranks waits for itself.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis

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
