"""Check of the variables that say where ranks meet, before torch is asked: a wrong one is a sentence, not a timeout."""

import ipaddress
import os
import socket
from collections.abc import Mapping

from megatronish.core.errors import UserError
from megatronish.launch.launcher import integer

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
        found = [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return None
    return next((each for each in found if ":" not in each), next(iter(found), None))


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
