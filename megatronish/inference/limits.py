"""Limits of the server: who may ask, how much a request may hold, and how long it may take to arrive.

A web page that a user of this machine has open can send requests to its servers, and read answers if the page's own
name leads here (DNS rebinding). So the Host of a request must be a name of this server, and so must its Origin, which
browsers add. A request that does not arrive whole in time, or is too large, ends its connection; and so does a client
that does not read its answer.
"""

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from uvicorn.protocols.http.h11_impl import H11Protocol

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK = ("localhost", "127.0.0.1", "::1")
SLOWEST = 10_000
"""Bytes of an answer that a client must read in a second, after the seconds that it has anyway."""


@dataclass(frozen=True)
class Limits:
    """Limits of one server. `host` is the address that it listens at, `allowed_hosts` are further names of it."""

    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    request_bytes: int = 2**21
    seconds: float = 30.0
    connections: int = 200

    def knows(self, host: str) -> bool:
        """Whether the host of a Host or Origin header, without its port, is a name of this server.

        One that listens for other machines is known by each address, which no other page can have as its name, and by
        the name of the machine.
        """
        name = host.lower().rstrip(".")
        if "*" in self.allowed_hosts or name in (*LOOPBACK, self.host.lower(), *map(str.lower, self.allowed_hosts)):
            return True
        if _is_loopback(self.host):
            return False
        return _is_address(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def limited(app: Application, limits: Limits) -> Application:
    """The application behind its limits: it sees requests of known hosts, whole."""

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if (why := _refusal(headers, limits)) is not None:
            await _refuse(send, *why)
            return
        try:
            async with asyncio.timeout(limits.seconds):
                body = await _body(receive, limits.request_bytes)
        except TimeoutError:
            await _refuse(send, 408, f"the request did not arrive within {limits.seconds:g} s")
            return
        if body is None:
            await _refuse(send, 413, _too_large(limits))
            return
        await app(scope, _receiver(body, receive), send)

    return answer


def _too_large(limits: Limits) -> str:
    return f"the request is larger than {limits.request_bytes} bytes (--max-request-bytes)"


def _refusal(headers: dict[str, str], limits: Limits) -> tuple[int, str] | None:
    """Status and reason to refuse a request by its headers; None for a good one."""
    for name, value in (("host", f"//{headers.get('host', '')}"), ("origin", headers.get("origin"))):
        if value is not None and not limits.knows(_host_of(value)):
            told = json.dumps(headers.get(name, "")[:100])
            return 403, f"{name} {told} is no name of this server; --allowed-hosts adds one when it is started"
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limits.request_bytes:
        return 413, _too_large(limits)
    return None


def _host_of(url: str) -> str:
    """Host of a URL; empty if there is none."""
    with contextlib.suppress(ValueError):
        return urlsplit(url).hostname or ""
    return ""


async def _body(receive: Receive, most: int) -> bytes | None:
    """The body of a request; None for one of more bytes."""
    parts, size = [], 0
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            return None
        if message["type"] != "http.request" or not message.get("more_body", False):
            return b"".join(parts)


def _receiver(body: bytes, receive: Receive) -> Receive:
    """What the application receives: the body as one message, and then what follows."""
    left = [body]

    async def next_message() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return next_message


async def _refuse(send: Send, status: int, why: str) -> None:
    """An error in OpenAI's form, after which the connection is closed."""
    error = {"message": why, "type": "invalid_request_error", "param": None, "code": None}
    content = json.dumps({"error": error}).encode()
    headers = [
        *((b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def protocol(limits: Limits) -> type[H11Protocol]:
    """Protocol of connections whose headers must arrive, and whose answers must be read, in time; no more than so many.

    What a client has not read waits here once the system's buffers are full, and the connection has its place as long.
    """

    class LimitedProtocol(H11Protocol):
        """HTTP/1.1 with two clocks: from the first wait for a request to the end of its headers, and for each write."""

        clock: asyncio.TimerHandle | None = None
        write_clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # the clock is to see every byte that waits
            if len(self.connections) > limits.connections:
                self._end(b"503 Service Unavailable")
            else:
                self.clock = self.loop.call_later(limits.seconds, self._end, b"408 Request Timeout")

        def data_received(self, data: bytes) -> None:
            if self.clock is None and not self._is_answering():
                self.clock = self.loop.call_later(limits.seconds, self._end, b"408 Request Timeout")
            super().data_received(data)
            if self.clock is not None and self._is_answering():
                self.clock.cancel()
                self.clock = None

        def pause_writing(self) -> None:
            super().pause_writing()
            seconds = limits.seconds + self.transport.get_write_buffer_size() / SLOWEST
            self.write_clock = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self._stop_write_clock()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.clock is not None:
                self.clock.cancel()
            self._stop_write_clock()
            super().connection_lost(exc)

        def _stop_write_clock(self) -> None:
            if self.write_clock is not None:
                self.write_clock.cancel()
                self.write_clock = None

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _end(self, status: bytes) -> None:
            if not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
                self.transport.close()

    return LimitedProtocol
