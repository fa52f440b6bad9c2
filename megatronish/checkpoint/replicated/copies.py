"""Copies of a run's state nearby, on each host and for its neighbour (write.py), and the vote on them after a start.

The vote finds the newest copy of which every file is somewhere, whole. Each host lists the files that it has of each
copy. Copies are distinguished by their checksums.json, which is the same on every host: a step that was made twice, by
a run that went back, has two copies and not one. The files of the newest copy are read and verified, each host's by its
own ranks; files that are damaged leave the list, and the vote is repeated.
"""

import hashlib
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from megatronish.checkpoint.checksums import CHECKSUMS, Checksums, DamagedError
from megatronish.checkpoint.folder import read_state, steps_in, taken_at
from megatronish.checkpoint.load import open_checked
from megatronish.checkpoint.replicated.folders import ID, claim_folder, id_of, remove_folder
from megatronish.checkpoint.replicated.local import Hosts, choose_folder
from megatronish.checkpoint.replicated.write import (
    SMALL,
    Nearby,
    Transfer,
    failures_of,
    remove_partial,
    write_copy,
    write_small,
)
from megatronish.checkpoint.tensors import GlobalTensor, files_for
from megatronish.core.errors import UserError
from megatronish.core.remote import Location
from megatronish.parallel.all_or_none import all_or_none, from_all, from_one
from megatronish.parallel.mesh import Axis

Damage = list[str]


class HeldCopy(NamedTuple):
    """Part of a copy that one host has: when its state was taken, all of its files, and those that this host has."""

    folder: str
    taken_at: float
    all_files: frozenset[str]
    files: frozenset[str]


class FoundCopy(NamedTuple):
    """A whole copy: its key, the name of its folder, when its state was taken, and which hosts have which files."""

    key: str
    name: str
    taken_at: float
    holders: Mapping[str, tuple[int, ...]]


def newest_copy(nearby: Nearby, *, launch: str | None = None) -> tuple[FoundCopy | None, Damage]:
    """Newest whole copy, or None, and a sentence for each file that is damaged; the same on all ranks. Collective.

    With `launch` only copies that an attempt of that launch has made count.
    """
    lists = from_all(nearby.axis, lambda: _listed(nearby.folder, launch) if nearby.hosts.is_first else ({}, []))
    told = [line for _, lines in lists for line in lines]
    of_hosts = [lists[ranks[0]][0] for ranks in nearby.hosts.ranks]
    while (copy := _newest_whole(of_hosts)) is not None:
        bad = from_all(nearby.axis, lambda copy=copy: _verified(nearby, copy))  # type: ignore[misc]
        if not any(bad):
            break
        for rank, of_rank in enumerate(bad):
            host = nearby.hosts.number_of(rank)
            for name, why in of_rank.items():
                held = of_hosts[host][copy.key]
                of_hosts[host][copy.key] = held._replace(files=held.files - {name})
                told.append(f"{why} (on the host of rank {rank}); that file is not used")
    return copy, told


def _listed(folder: Path, launch: str | None) -> tuple[dict[str, HeldCopy], Damage]:
    """Copies in a host's folder, by key, and a sentence for each whose list of files cannot be read."""
    copies: dict[str, HeldCopy] = {}
    told: Damage = []
    for path in steps_in(folder).values():
        try:
            checksums = Checksums.read(path)
            lengths = {name: sum(span.length for span in spans) for name, spans in checksums.files.items()}
            here = {name for name, length in lengths.items() if _has(path / name, length)}
            key = hashlib.sha256((path / CHECKSUMS).read_bytes()).hexdigest()
            state = read_state(path, checksums)
            if launch is not None and state.get("launch") != launch:
                continue
            taken = float(state.get("taken_at", state["saved_at"]))
            copies[key] = HeldCopy(path.name, taken, frozenset({*lengths, CHECKSUMS}), frozenset({*here, CHECKSUMS}))
        except DamagedError as error:
            told.append(f"{path}: {error.why}; that copy is not used")
        except OSError as error:
            told.append(f"{path} cannot be read ({error.strerror}); that copy is not used")
        except (KeyError, TypeError, ValueError):
            told.append(f"{path} is no copy of a run; it is not used")
    return copies, told


def _has(path: Path, length: int) -> bool:
    return path.is_file() and path.stat().st_size == length


def _newest_whole(of_hosts: Sequence[Mapping[str, HeldCopy]]) -> FoundCopy | None:
    """The newest copy that the hosts have whole together."""
    newest: FoundCopy | None = None
    for key, held in {key: held for of_host in of_hosts for key, held in of_host.items()}.items():
        holders = {
            name: tuple(host for host, of_host in enumerate(of_hosts) if key in of_host and name in of_host[key].files)
            for name in held.all_files
        }
        if all(holders.values()) and (newest is None or held.taken_at > newest.taken_at):
            newest = FoundCopy(key, held.folder, held.taken_at, holders)
    return newest


def _verified(nearby: Nearby, copy: FoundCopy) -> dict[str, str]:
    """What is wrong with the files of a copy that this rank verifies: its share of those of its host."""
    hosts = nearby.hosts
    own = hosts.number_of(hosts.rank)
    here = sorted(name for name, holders in copy.holders.items() if own in holders and name != CHECKSUMS)
    if not here:
        return {}
    folder, wrong = nearby.folder / copy.name, {}
    try:
        spans = Checksums.read(folder).files
    except DamagedError as error:
        return dict.fromkeys(here, f"{folder}: {error.why}")
    for name in here[hosts.own.index(hosts.rank) :: len(hosts.own)]:
        try:
            Checksums(folder, {name: spans[name]}).verify()
        except DamagedError as error:
            wrong[name] = f"{folder}: {error.why}"
    return wrong


# Fetching of a found copy: each host gets the files that its ranks read and that it does not have, from their holders.
#
# A host that has lost its folder gets the small files first; .metadata then says which files a rank's tensors lie in.
# In the layout of the copy these are few; in another layout, after hosts were lost, whichever hold a part of them.
def fetch_small(nearby: Nearby, copy: FoundCopy) -> Path:
    """Folder of the copy on this host, with its small files. Collective."""
    folder, hosts, axis = nearby.folder / copy.name, nearby.hosts, nearby.axis
    small = {}
    for name in SMALL:
        first = hosts.ranks[copy.holders[name][0]][0]
        small[name] = from_one(axis, (folder / name).read_bytes, rank=first)
    has_it = all(hosts.number_of(hosts.rank) in copy.holders[name] for name in SMALL)

    def write() -> None:
        if hosts.number_of(hosts.rank) not in copy.holders[CHECKSUMS]:
            shutil.rmtree(folder, ignore_errors=True)  # the same step of another copy
        write_small(folder, small)

    all_or_none(axis, write if hosts.is_first and not has_it else lambda: None)
    return folder


def fetch_tensors(nearby: Nearby, copy: FoundCopy, tensors: dict[str, GlobalTensor]) -> int:
    """Fetch the files in which `tensors` lie; returns the bytes that hosts got from each other. Collective.

    A file that one host alone has goes to the next host, too, if that has room for it: that of the lost host's
    neighbour is lost otherwise, if it is the next to be lost, before there is a new copy. OSError, on all ranks, if a
    host has no room for what its ranks read; nothing that was fetched stays then.
    """
    folder, axis, hosts = nearby.folder / copy.name, nearby.axis, nearby.hosts

    def read() -> tuple[set[str], dict[str, int]]:
        reader = open_checked(folder, tensors, checks_all=False)
        lengths = {name: sum(span.length for span in spans) for name, spans in reader.checksums.files.items()}
        return files_for(tensors, reader), lengths

    needs, lengths = all_or_none(axis, read)
    transfers = planned(hosts, copy, from_all(axis, lambda: needs), lengths)
    if failed := _moved(transfers.needed, folder, axis):
        _remove(transfers.needed, folder, axis)
        raise next(iter(failed.values()))
    failed = _moved(transfers.second, folder, axis)
    _remove(failed, folder, axis)
    return sum(transfer.length for transfer in (*transfers.needed, *transfers.second) if transfer not in failed)


class Transfers(NamedTuple):
    """Transfers without which a rank lacks what it reads, and those that give a file a second host."""

    needed: list[Transfer]
    second: list[Transfer]


def planned(hosts: Hosts, copy: FoundCopy, needs: Sequence[Collection[str]], lengths: Mapping[str, int]) -> Transfers:
    """Transfers after which each host has the files that its ranks need, by rank, and each file has two hosts."""
    needed: list[Transfer] = []
    second: list[Transfer] = []
    by_host = [set().union(*(needs[rank] for rank in ranks)) for ranks in hosts.ranks]
    for name in sorted(lengths.keys() - set(SMALL)):
        holders, transfers = copy.holders[name], needed
        targets = [host for host, names in enumerate(by_host) if name in names and host not in holders]
        if not targets and len(holders) == 1 and len(hosts.ranks) > 1:
            targets, transfers = [(holders[0] + 1) % len(hosts.ranks)], second
        for target in targets:
            # Ranks of the holder take turns in sending, and those of the target in receiving.
            turn, senders, receivers = len(transfers), hosts.ranks[holders[0]], hosts.ranks[target]
            ends = senders[turn % len(senders)], receivers[turn % len(receivers)]
            transfers.append(Transfer(name, lengths[name], *ends))
    return Transfers(needed, second)


def _moved(transfers: Sequence[Transfer], folder: Path, axis: Axis) -> dict[Transfer, OSError]:
    """Transfers that failed at one of their ends, and why; the same on all ranks. Collective."""
    failed: dict[Transfer, OSError] = {}
    for of_rank in from_all(axis, lambda: failures_of(transfers, folder, axis)):
        failed |= of_rank
    return failed


def _remove(transfers: Iterable[Transfer], folder: Path, axis: Axis) -> None:
    """Remove what this rank has received: half a file, or what its sender could not read."""
    for transfer in transfers:
        if transfer.target == axis.rank:
            with suppress(OSError):  # else the vote after the next start finds that it is not whole
                (folder / transfer.name).unlink()


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
        lock = all_or_none(axis, partial(claim_folder, folder, save_place) if hosts.is_first else lambda: None)
        return cls(nearby, save_place, lock)

    def fetch_newest(
        self,
        tensors: Callable[[dict[str, Any]], dict[str, GlobalTensor]],
        *,
        than: Location | None,
        launch: str | None = None,
    ) -> Path | None:
        """Folder of the newest whole copy: a checkpoint with those files on this host in which `tensors` lie.

        These are asked for by its state.

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
            fetch_tensors(self.nearby, copy, tensors(all_or_none(axis, partial(read_state, folder))))
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
