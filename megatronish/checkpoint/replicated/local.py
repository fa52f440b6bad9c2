"""Hosts of a run and their local folders: in memory that outlives its processes where that has room, else on a disk.

/dev/shm is such memory: a process that is started again finds there what the one before it has written. The ranks that
share a folder are a host. The first of them looks for all: free bytes change between two looks.

Who keeps copies for whom: each rank's neighbour is a rank of the next host. The neighbour of the i-th rank of a host is
the i-th rank of the host after it, and the last host's is on the first: with equal hosts, rank + local_world_size
modulo world_size. So a copy of everything is left after any one host is lost, or any number of hosts of which no two
follow each other.
"""

import os
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from megatronish.checkpoint.folder import steps_in
from megatronish.checkpoint.replicated.folders import (
    OWNER,
    folder_of_user,
    make_folder,
    orphans_in,
    remove_folder,
    remove_orphans,
)
from megatronish.core.control_groups import bytes_within_limits
from megatronish.core.errors import UserError
from megatronish.parallel.all_or_none import from_all, from_one
from megatronish.parallel.mesh import Axis


@dataclass(frozen=True)
class Hosts:
    """Ranks by host, in the order of their first ranks, and this process's rank."""

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, names: Sequence[str], *, rank: int) -> "Hosts":
        """Hosts of ranks whose local folders have these names, one for each rank."""
        by_name: dict[str, list[int]] = {}
        for number, name in enumerate(names):
            by_name.setdefault(name, []).append(number)
        return cls(tuple(map(tuple, by_name.values())), rank)

    @property
    def own(self) -> tuple[int, ...]:
        """Ranks of this rank's host."""
        return self.ranks[self.number_of(self.rank)]

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for its host."""
        return self.own[0] == self.rank

    def number_of(self, rank: int) -> int:
        """Number of a rank's host."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def keeper_of(self, rank: int) -> int | None:
        """Rank of the next host that keeps a copy for `rank`; None where there is one host alone."""
        number = self.number_of(rank)
        keepers = self.ranks[(number + 1) % len(self.ranks)]
        return None if rank in keepers else keepers[self.ranks[number].index(rank) % len(keepers)]


# Which ranks share a folder: each makes a file of its own in it, and looks for those of the others.
#
# So what counts is the folder, and not how hosts and containers are named: two containers of one name have memories of
# their own, and two of different names may share one.
class Shared(NamedTuple):
    """A folder that some ranks share: the first of them, and the number of the folder among those of that rank."""

    rank: int
    number: int


def share(folders: Sequence[Path], axis: Axis) -> list[Shared | str]:
    """What this rank shares in each of its folders, which are made, or why a folder cannot be written. Collective."""
    nonce = from_one(axis, lambda: uuid.uuid4().hex)
    names = [f".host_{nonce}_{axis.rank}_{number}" for number in range(len(folders))]
    made = [_made(folder, name) for folder, name in zip(folders, names, strict=True)]
    counts = from_all(axis, lambda: len(folders))
    shared = from_all(axis, partial(_first_seen, folders, made, nonce, counts))[axis.rank]
    for folder, name in zip(folders, names, strict=True):  # all have looked
        with suppress(OSError):
            (folder / name).unlink()
    from_all(axis, lambda: None)  # and all have removed theirs
    return shared


def _made(folder: Path, name: str) -> str | None:
    """Make the folder and a file in it; why not, if that fails."""
    try:
        (make_folder(folder) / name).touch()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _first_seen(
    folders: Sequence[Path], made: Sequence[str | None], nonce: str, counts: Sequence[int]
) -> list[Shared | str]:
    """In each folder the first file that is there. Asked for by name: listings may be old on network file systems."""
    first_files: list[Shared | str] = []
    for folder, error in zip(folders, made, strict=True):
        every = (Shared(rank, number) for rank, count in enumerate(counts) for number in range(count))
        seen = (each for each in every if os.path.lexists(folder / f".host_{nonce}_{each.rank}_{each.number}"))
        first_files.append(error if error is not None else next(seen, "its files cannot be seen"))
    return first_files


MEMORY = Path("/dev/shm")


class Offer(NamedTuple):
    """What a folder has: copies of the run or not, whether the run has chosen it before, bytes that may be written.

    `removed` are copies of other runs that were next to it, and for which there was no room.
    """

    has_copies: bool
    was_chosen: bool
    free: int
    removed: tuple[Path, ...] = ()


def choose_folder(local_save: str | None, run: str, *, written: int, axis: Axis) -> tuple[Path, Hosts]:
    """Folder of the run `run` on this host, made if it is missing, and the hosts. Collective.

    That of --local-save, else the first of memory and temporary directory that has it already or has the room: for
    twice the bytes that its ranks write and keep, of which this rank writes `written`. One with copies is taken without
    the room, too: fewer hosts need more each, and what is there must be found. UserError if a host has none.
    """
    folders = [parent / run for parent in _parents(local_save)]
    shared = share(folders, axis)
    needed = _needed(from_all(axis, lambda: (shared, written)))
    own = {
        each: folder
        for each, folder in zip(shared, folders, strict=True)
        if isinstance(each, Shared) and each.rank == axis.rank
    }
    offers: dict[Shared, Offer] = {}
    for of_rank in from_all(axis, lambda: {each: _offer(folder, needed[each]) for each, folder in own.items()}):
        offers |= of_rank
    _tell_removed(offers, axis)
    number = from_all(axis, lambda: _chosen(folders, shared, needed, offers))[axis.rank]
    chosen = from_all(axis, lambda: shared[number])
    for each, folder in own.items():
        if each not in chosen and not offers[each].has_copies:
            remove_folder(folder)
    return folders[number], Hosts.of([str(each) for each in chosen], rank=axis.rank)


def _parents(local_save: str | None) -> list[Path]:
    """Folders around those of runs, in the order in which they are preferred."""
    if local_save is not None:
        return [Path(local_save)]
    parents = [MEMORY / folder_of_user()]
    with suppress(FileNotFoundError):  # no temporary directory can be written
        parents.append(Path(tempfile.gettempdir()) / folder_of_user())
    return parents


def _needed(of_ranks: Sequence[tuple[Sequence[Shared | str], int]]) -> Mapping[Shared, int]:
    """Bytes that copies need in each folder, from what all ranks share and write."""
    own: Counter[Shared] = Counter()
    for shared, size in of_ranks:
        own.update(dict.fromkeys((each for each in shared if isinstance(each, Shared)), size))
    # The copy before stays until a copy is whole. What is kept is what another host writes, at most the largest part.
    return {
        each: 2
        * (size + max((own[other] for other in own if other != each and other.number == each.number), default=0))
        for each, size in own.items()
    }


def _offer(folder: Path, needed: int) -> Offer:
    """What a folder offers, once the folders of runs that are gone are removed next to it.

    Those of runs that may have moved are removed, too, where `needed` bytes have room without them alone.
    """
    remove_orphans(folder.parent, but=folder.name)
    offer = _measured(folder)
    moved = orphans_in(folder.parent, but=folder.name, moved_for=0.0)
    if not offer.has_copies and offer.free < needed <= offer.free + sum(map(_size, moved)):
        removed = remove_orphans(folder.parent, but=folder.name, moved_for=0.0)
        offer = _measured(folder)._replace(removed=tuple(removed))
    return offer


def _tell_removed(offers: Mapping[Shared, Offer], axis: Axis) -> None:
    """Print which copies of other runs were removed: their run may be started again where it was moved to."""
    for removed in (path for offer in offers.values() for path in offer.removed) if axis.is_first else ():
        tqdm.write(
            f"{removed} is removed for the room: copies of a run that was killed, and whose folder of checkpoints is "
            "not where it was. If that was moved, the run resumes from its newest checkpoint",
            file=sys.stderr,
        )


def _measured(folder: Path) -> Offer:
    free = shutil.disk_usage(folder).free
    if folder.is_relative_to(MEMORY):
        free = int(min(free, bytes_within_limits()))
    return Offer(bool(steps_in(folder)), (folder / OWNER).exists(), free + _size(folder))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _chosen(
    folders: Sequence[Path],
    shared: Sequence[Shared | str],
    needed: Mapping[Shared, int],
    offers: Mapping[Shared, Offer],
) -> int:
    """Number of the folder that a rank takes."""
    told, most = [], 0
    offers_by_number = {number: offers[each] for number, each in enumerate(shared) if isinstance(each, Shared)}
    rooms = {number: needed[each] for number, each in enumerate(shared) if isinstance(each, Shared)}
    for number in sorted(
        offers_by_number,
        key=lambda number: (not offers_by_number[number].has_copies, not offers_by_number[number].was_chosen),
    ):
        offer, room = offers_by_number[number], rooms[number]
        most = max(most, room)
        if offer.has_copies or offer.free >= room:
            return number
        told.append(f"{folders[number].parent} has {_in_words(offer.free)} free")
    told += [f"{folders[n].parent} cannot be written: {why}" for n, why in enumerate(shared) if isinstance(why, str)]
    wanted = _in_words(most) if most else "room"
    raise UserError(
        f"copies of the state need {wanted} on each host, twice what its ranks write and keep, and "
        f"{'; '.join(told)}; name a folder with room by --local-save, or leave --save-replicated-interval out"
    )


def _in_words(num_bytes: int) -> str:
    """Bytes in words, so that a need and the room differ in words, also where both are small."""
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 10_000_000 else f"{num_bytes:,} bytes"
