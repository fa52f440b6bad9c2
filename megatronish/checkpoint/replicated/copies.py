"""Copies of a run's state nearby: on each host, in memory, and for its neighbour (write.py, vote.py, fetch.py)."""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from megatronish.checkpoint.all_or_none import all_or_none, from_all, from_one
from megatronish.checkpoint.folder import steps_in, taken_at
from megatronish.checkpoint.remote import Location
from megatronish.checkpoint.replicated.fetch import fetch_small, fetch_tensors
from megatronish.checkpoint.replicated.folders import remove_folder
from megatronish.checkpoint.replicated.identity import ID, id_of
from megatronish.checkpoint.replicated.local import choose_folder
from megatronish.checkpoint.replicated.orphans import own
from megatronish.checkpoint.replicated.vote import newest_copy
from megatronish.checkpoint.replicated.write import Nearby, remove_partial, write_copy
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.core.errors import UserError
from megatronish.parallel.mesh import Axis


class NearbyCopies:
    """Copies of a run on the hosts of its ranks. All ranks call each method together, a thread may call `write`."""

    def __init__(self, nearby: Nearby, save_place: Location, lock: BinaryIO | None = None) -> None:
        self.nearby, self.save_place, self._lock = nearby, save_place, lock

    @classmethod
    def open(
        cls, local_save: str | None, *, save_place: Location, tensors: dict[str, GlobalTensor], axis: Axis
    ) -> "NearbyCopies":
        """Folders with room for copies of `tensors`; UserError if a host has none. `axis` is for copies alone."""
        run = from_one(axis, partial(id_of, save_place))
        written = sum(tensor.local.nbytes for tensor in tensors.values() if tensor.writes)
        folder, hosts = choose_folder(local_save, run, written=written, axis=axis)
        nearby = Nearby(folder, hosts, axis)
        all_or_none(axis, partial(remove_partial, folder) if hosts.is_first else lambda: None)
        lock = all_or_none(axis, partial(own, folder, save_place) if hosts.is_first else lambda: None)
        return cls(nearby, save_place, lock)

    def fetch_newest(
        self, tensors: dict[str, GlobalTensor], *, than: Location | None, launch: str | None = None
    ) -> Path | None:
        """Folder of the newest whole copy: a checkpoint with those files on this host in which `tensors` lie.

        None if there is none whose state was taken after that of the checkpoint `than`: one that is uploaded slowly is
        there later than copies of the steps after it. With `launch` it is one that this launch has made. None, too, if
        a host has no room for the files that it lacks; UserError then without `than`. What is wrong is printed.
        """
        copy, damage = newest_copy(self.nearby, launch=launch)
        axis = self.nearby.axis
        for line in damage if axis.is_first else ():
            tqdm.write(line, file=sys.stderr)
        if copy is None or (than is not None and not from_one(axis, lambda: copy.taken_at > taken_at(than))):
            return None
        try:
            folder = fetch_small(self.nearby, copy)
            fetch_tensors(self.nearby, copy, tensors)
        except OSError as error:  # on all ranks, as on a host that has no room for the files of a lost one
            why = f"the copy nearby {self.nearby.folder / copy.name} cannot be put together: {error.strerror or error}"
            if than is None:
                raise UserError(
                    f"{why}; the run has no checkpoint: make room on the host that lacks it, or remove "
                    f"{self.nearby.folder} on every host to begin without that state"
                ) from error
            if axis.is_first:
                tqdm.write(f"{why}. The run resumes from {than}, an older state", file=sys.stderr)
            return None
        return folder

    def newest_time(self) -> float:
        """Latest time at which a state of these copies was taken, whole or not; 0 without copies. Collective."""
        hosts, folder = self.nearby.hosts, self.nearby.folder

        def newest_here() -> float:
            return max(map(taken_at, steps_in(folder).values()), default=0.0) if hosts.is_first else 0.0

        return max(from_all(self.nearby.axis, newest_here))

    def write(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> None:
        """Write a copy on all hosts, or RunError on all; the copy before is removed."""
        write_copy(self.nearby, step=step, tensors=tensors, state=state)

    def remove(self) -> None:
        """Remove all copies: the run has ended, and its last checkpoint is written."""
        if self._lock is not None:
            self._lock.close()
        if self.nearby.hosts.is_first:
            remove_folder(self.nearby.folder)
        if self.nearby.axis.is_first:
            with suppress(OSError):
                (self.save_place / ID).unlink()
