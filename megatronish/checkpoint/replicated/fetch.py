"""Fetching of a found copy: each host gets the files that its ranks read and that it does not have, from their holders.

A host that has lost its folder gets the small files first; .metadata then says which files a rank's tensors lie in. In
the layout of the copy these are few; in another layout, after hosts were lost, whichever hold a part of them.
"""

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatronish.checkpoint.all_or_none import all_or_none, from_all, from_one
from megatronish.checkpoint.checksums import CHECKSUMS
from megatronish.checkpoint.load import open_checked
from megatronish.checkpoint.replicated.hosts import Hosts
from megatronish.checkpoint.replicated.transfer import Transfer, failures_of
from megatronish.checkpoint.replicated.vote import FoundCopy
from megatronish.checkpoint.replicated.write import SMALL, Nearby, write_small
from megatronish.checkpoint.tensors import GlobalTensor, files_for
from megatronish.parallel.mesh import Axis


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
