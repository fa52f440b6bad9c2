"""Vote of the hosts after a start: the newest copy of which every file is somewhere, whole.

Each host lists the files that it has of each copy. Copies are distinguished by their checksums.json, which is the same
on every host: a step that was made twice, by a run that went back, has two copies and not one. The files of the newest
copy are read and verified, each host's by its own ranks; files that are damaged leave the list, and the vote is
repeated.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatronish.checkpoint.checksums import CHECKSUMS, Checksums, DamagedError
from megatronish.checkpoint.folder import read_state, steps_in
from megatronish.checkpoint.replicated.write import Nearby
from megatronish.parallel.all_or_none import from_all

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
    found: dict[str, HeldCopy] = {}
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
            found[key] = HeldCopy(path.name, taken, frozenset({*lengths, CHECKSUMS}), frozenset({*here, CHECKSUMS}))
        except DamagedError as error:
            told.append(f"{path}: {error.why}; that copy is not used")
        except OSError as error:
            told.append(f"{path} cannot be read ({error.strerror}); that copy is not used")
        except (KeyError, TypeError, ValueError):
            told.append(f"{path} is no copy of a run; it is not used")
    return found, told


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
