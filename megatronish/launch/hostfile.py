"""Hosts of a run in DeepSpeed's forms: a hostfile of lines "host slots=N", and --include and --exclude of it.

A slot is a device, by its number on its host. NAME[:SLOT[,SLOT ...]] joined by @ says which of them, as in
--include "worker-0@worker-1:0,2"; a host without slots means all of its slots.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatronish.core.errors import UserError
from megatronish.core.files import ordinary

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""A host: a name or an IPv4 address. One that begins with a dash would be an option of ssh."""
LINE = re.compile(r"(\S+)\s+slots\s*=\s*([0-9]+)")
MOST_SLOTS, MOST_BYTES = 1024, 2**20


class Host(NamedTuple):
    """A host, and the numbers of the devices that a run uses there, a rank on each."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: Path) -> list[Host]:
    """Hosts of a file, with all their slots, in the file's order, which is that of the ranks."""
    try:
        with ordinary(path).open("rb") as file:
            text = file.read(MOST_BYTES + 1).decode()
    except OSError as error:
        raise UserError(
            f"--hostfile {path} cannot be read: {error.strerror or error}; give a file of lines such as: "
            "worker-0 slots=8"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"--hostfile {path} is not text in UTF-8; write lines such as: worker-0 slots=8") from None
    if len(text) > MOST_BYTES:
        raise UserError(f"--hostfile {path} is longer than {MOST_BYTES:,} bytes; is it a hostfile?")
    hosts = list(_hosts(text, path))
    if not hosts:
        raise UserError(f"--hostfile {path} names no host; write lines such as: worker-0 slots=8")
    return hosts


def _hosts(text: str, path: Path) -> Iterator[Host]:
    first: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        where = f"--hostfile {path}, line {number}"
        match = LINE.fullmatch(words)
        if match is None:
            raise UserError(f"{where}: {words!r} must be a host and its slots, such as: worker-0 slots=8")
        name, digits = match[1], match[2].lstrip("0") or "0"
        slots = int(digits) if len(digits) <= 9 else MOST_SLOTS + 1
        if NAME.fullmatch(name) is None:
            raise UserError(
                f"{where}: {name!r} is no name of a host, which has letters, digits, dots and dashes; a user or a port "
                "belongs into ~/.ssh/config"
            )
        if not 1 <= slots <= MOST_SLOTS:
            raise UserError(
                f"{where}: slots={digits[:20]} of {name} must be between 1 and {MOST_SLOTS}; put a # before a host "
                "that is not used"
            )
        if name in first:
            raise UserError(
                f"{where}: {name} is in line {first[name]} already; give each host one line with all its slots"
            )
        first[name] = number
        yield Host(name, tuple(range(slots)))


def chosen(
    hosts: Sequence[Host], *, include: str, exclude: str, num_nodes: int | None, num_gpus: int | None
) -> list[Host]:
    """The hosts and slots that a run uses, in the file's order."""
    if include and exclude:
        raise UserError("--include and --exclude contradict each other: both say which slots are used; leave one out")
    if (include or exclude) and (num_nodes is not None or num_gpus is not None):
        raise UserError("--num-nodes and --num-gpus take the first hosts and slots; leave --include and --exclude out")
    chosen_hosts = list(hosts)
    if include:
        named = _named("--include", include, hosts)
        chosen_hosts = [Host(host.name, named[host.name]) for host in hosts if host.name in named]
    if exclude:
        named = _named("--exclude", exclude, hosts)
        left = [
            Host(host.name, tuple(slot for slot in host.slots if slot not in named.get(host.name, ())))
            for host in hosts
        ]
        chosen_hosts = [host for host in left if host.slots]
        if not chosen_hosts:
            raise UserError(f"--exclude {exclude} leaves no slot of the hostfile; exclude less")
    return _first(chosen_hosts, num_nodes, num_gpus)


def _first(hosts: list[Host], num_nodes: int | None, num_gpus: int | None) -> list[Host]:
    """The first hosts, and the first slots of each."""
    if num_nodes is not None and num_nodes > len(hosts):
        raise UserError(f"--num-nodes {num_nodes} is more than the {len(hosts)} hosts of the hostfile; lower it")
    hosts = hosts[:num_nodes]
    for host in hosts:
        if num_gpus is not None and num_gpus > len(host.slots):
            raise UserError(
                f"--num-gpus {num_gpus} is more than the {len(host.slots)} slots of {host.name}; lower it, or "
                "--exclude that host"
            )
    return [Host(host.name, host.slots[:num_gpus]) for host in hosts]


def _named(flag: str, words: str, hosts: Sequence[Host]) -> Mapping[str, tuple[int, ...]]:
    """{host: its slots} of --include or --exclude; a host that is named twice has the slots of both."""
    slots_of = {host.name: host.slots for host in hosts}
    named_slots: dict[str, set[int]] = {}
    for part in words.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in slots_of:
            raise UserError(f"{flag} {words}: {name!r} is not in the hostfile, which has {', '.join(slots_of)}")
        wanted = numbers.split(",") if colon else [str(slot) for slot in slots_of[name]]
        for number in wanted:
            slot = number.strip().lstrip("0") or "0"
            if slot not in map(str, slots_of[name]) or not number.strip():
                raise UserError(
                    f"{flag} {words[:200]}: {name} has no slot {number.strip()[:20]!r}; its slots are 0 to "
                    f"{slots_of[name][-1]}, as in {name}:0,1"
                )
            named_slots.setdefault(name, set()).add(int(slot))
    return {name: tuple(sorted(slots)) for name, slots in named_slots.items()}
