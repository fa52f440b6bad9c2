"""Rendezvous of the ranks of one attempt: the check of where they meet, and a store that outlives attempts.

The variables of the address are checked before torch is asked: a wrong one is a sentence, not a timeout.

A store that outlives attempts is one that torchrun's agents keep. torchrun hands the same store to the ranks of every
attempt, and torch puts no attempt into its keys: ranks that are started again would read the addresses of those that
are gone. The number of restarts is no name for an attempt either, because agents count differently when nodes come and
go. So rank 0 makes up a name and leaves it in the store; the others read it, answer with a name of their own, and know
by rank 0's list of answers that the name is a fresh one.
"""

import ipaddress
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist

from megatronish.core.errors import RunError, UserError
from megatronish.launch.launcher import integer
from megatronish.launch.place import Place

ATTEMPT = "megatronish/attempt"
LAUNCH = "megatronish/launch"
SHORTEST, LONGEST = 0.01, 0.3  # seconds between two looks into the store


def has_lasting_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks meet in a store of torchrun's agent."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launch_in(store: dist.Store) -> str:
    """Name of the launch, which the ranks of all attempts find in the store of torchrun's agent.

    It is another one for each attempt where agents have a new store for each: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    while isinstance(store, dist.PrefixStore):  # that of an attempt
        store = store.underlying_store
    return bytes(store.compare_set(LAUNCH, "", uuid.uuid4().hex)).decode()


def store_of_attempt(store: dist.Store, place: Place, *, timeout: timedelta) -> dist.Store:
    """The part of a store that the ranks of this attempt alone use. Collective: returns when all ranks have come.

    RunError after the timeout, with the ranks that have not come.
    """
    looks = _looks(timeout)
    mine = uuid.uuid4().hex
    name = _invite(store, mine, place, looks) if place.rank == 0 else _answer(store, mine, place, looks)
    return dist.PrefixStore(name, store)


def _invite(store: dist.Store, name: str, place: Place, looks: Iterator[None]) -> str:
    """Rank 0: leave the name, and list who has answered."""
    store.set(ATTEMPT, name)
    missing = {rank: f"{name}/answer/{rank}" for rank in range(1, place.world_size)}
    answers: dict[int, str] = {}
    while missing:
        for rank in [rank for rank, key in missing.items() if store.check([key])]:
            answers[rank] = store.get(missing.pop(rank)).decode()
        if missing and next(looks, False) is False:
            several = f"ranks {', '.join(map(str, missing))}" if len(missing) > 1 else f"rank {next(iter(missing))}"
            raise RunError(
                f"{several} of {place.world_size} did not come to the meeting within --distributed-timeout-minutes; "
                "look for the first rank that failed, and start all of them"
            )
    store.set(f"{name}/all", json.dumps(answers))
    return name


def _answer(store: dist.Store, mine: str, place: Place, looks: Iterator[None]) -> str:
    """Another rank: answer to the name that is there, until an answer is on the list."""
    answered = None
    while True:
        name = store.get(ATTEMPT).decode() if store.check([ATTEMPT]) else None
        if name is not None and name != answered:
            store.set(f"{name}/answer/{place.rank}", mine)
            answered = name
        if answered is not None and store.check([f"{answered}/all"]):
            answers = json.loads(store.get(f"{answered}/all"))
            if answers.get(str(place.rank)) == mine:
                return answered
        if next(looks, False) is False:
            raise RunError(
                f"rank 0 of {place.world_size} did not come to the meeting within --distributed-timeout-minutes, or "
                "did not see all ranks there; look for the first rank that failed, and start all of them"
            )


def _looks(timeout: timedelta) -> Iterator[None]:
    """One item after each pause between two looks, which grow longer, until the timeout."""
    pause, deadline = SHORTEST, time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST)
        yield


LARGEST_PORT = 65535


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, which no other machine reaches."""
    return host == "localhost" or (_is_number(host) and ipaddress.ip_address(host).is_loopback)


def address_to_listen_on(host: str, *, is_on_one_machine: bool) -> str | None:
    """The one address on which rank 0 listens for those that look for it at `host`; None for all of the machine's.

    A name of several machines' runs may mean another address on each of them, 127.0.1.1 on its own.
    """
    if not (is_on_one_machine or is_loopback(host) or _is_number(host)):
        return None
    try:
        addresses = [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return None
    return next((each for each in addresses if ":" not in each), next(iter(addresses), None))


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def refuse_addresses(environ: Mapping[str, str] = os.environ) -> None:
    """UserError for a port that is none, a host that does not resolve, and a network interface that is none."""
    if "MASTER_PORT" in environ and not 1 <= (port := integer(environ, "MASTER_PORT")) <= LARGEST_PORT:
        raise UserError(f"MASTER_PORT={port} is no port; export a free one of 1 to {LARGEST_PORT} to all ranks")
    if host := environ.get("MASTER_ADDR"):
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            raise UserError(
                f"MASTER_ADDR={host} does not resolve on {socket.gethostname()}; export a name or an address of the "
                "machine of rank 0 that all machines know"
            ) from error
    known = {name for _, name in socket.if_nameindex()}
    for name in filter(None, environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in known:
            raise UserError(
                f"GLOO_SOCKET_IFNAME={name} is no network interface of {socket.gethostname()}; it has "
                f"{', '.join(sorted(known))}"
            )
