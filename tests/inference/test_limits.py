"""Tests of the limits of the server, on real sockets, with an application that returns the size of what it was sent."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from megatronish.inference import limits as limits_module
from megatronish.inference.limits import Limits, limited, protocol

QUICK = Limits(request_bytes=1000, seconds=0.4, connections=5)
PIECE, PIECES = b"x" * 4096, 4096
"""More than all buffers of the system between two sockets."""


async def echo(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    body = (await receive())["body"]
    if scope["path"] == "/endless":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(PIECES):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return
    if scope["path"] == "/large":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": PIECE * PIECES})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": f"{len(body):4}".encode()})


@contextlib.contextmanager
def serving(limits: Limits) -> Iterator[int]:
    """The port of a server with these limits."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(limited(echo, limits), http=protocol(limits), log_level="critical", ws="none", lifespan="off")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join()
    listening.close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(QUICK) as found:
        yield found


def answer(port: int, sent: bytes) -> bytes:
    """All that comes back until the connection is closed, at most for 20 s."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(sent)
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


def request(*, host: str = "localhost", body: bytes = b"{}", length: int | None = None, more: str = "") -> bytes:
    length = len(body) if length is None else length
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n{more}\r\n"
    )
    return head.encode("latin-1") + body


def status(answered: bytes) -> int:
    return int(answered.split()[1]) if answered else 0


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:80", "LOCALHOST.", "[::1]"])
def test_names_of_this_server_are_answered(port: int, host: str) -> None:
    assert answer(port, request(host=host)).endswith(b"   2")


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "[::", "a@localhost@b"]
)
def test_another_host_is_refused(port: int, host: str) -> None:
    answered = answer(port, request(host=host))
    assert status(answered) == 403
    assert "--allowed-hosts" in json.loads(answered.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost.evil.example:80"])
def test_a_page_of_another_name_is_refused(port: int, origin: str) -> None:
    assert status(answer(port, request(more=f"Origin: {origin}\r\n"))) == 403
    assert status(answer(port, request(more="Origin: http://localhost:3000\r\n"))) == 200


def test_names_can_be_added_and_other_machines_may_use_addresses() -> None:
    limits = Limits(host="0.0.0.0", allowed_hosts=("My.Name",))
    assert all(map(limits.knows, ("my.name", "10.1.2.3", "fe80::1", socket.gethostname(), "localhost")))
    assert not limits.knows("evil.example")
    assert Limits(allowed_hosts=("*",)).knows("evil.example")


@pytest.mark.parametrize("declared", [True, False], ids=["told", "in chunks"])
def test_a_request_that_is_too_large_is_refused_before_it_is_kept(port: int, declared: bool) -> None:
    if declared:
        sent = request(body=b"x" * 1001, length=300 * 2**20)
    else:
        chunks = b"400\r\n" + b"x" * 0x400 + b"\r\n"
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        sent = head + chunks * 4
    assert status(answer(port, sent)) == 413


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST / HTTP/1.1\r\nHost: local", request(body=b"{", length=100), request().partition(b"\r\n\r\n")[0]],
    ids=["nothing", "half a header", "half a body", "all but the end of the headers"],
)
def test_a_request_that_does_not_arrive_whole_ends_in_time(port: int, sent: bytes) -> None:
    begin = time.monotonic()
    assert status(answer(port, sent)) == 408
    assert time.monotonic() - begin < 15


def test_a_second_request_of_a_connection_has_its_clock_too(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request().replace(b"Connection: close\r\n", b""))
        assert status(connection.recv(65536)) == 200
        connection.sendall(b"POST / HT")
        assert b"HTTP/1.1 408" in connection.recv(65536) + connection.recv(65536)


def test_a_connection_too_many_is_closed_and_its_place_is_free_again(port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(QUICK.connections):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert status(answer(port, b"")) == 503
    deadline = time.monotonic() + 15
    while status(answer(port, request())) != 200:
        assert time.monotonic() < deadline


def unread(port: int, path: str, stack: contextlib.ExitStack) -> socket.socket:
    """A connection that has asked for a long answer."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
    connection.sendall(request().replace(b"/v1/completions", path.encode()))
    return connection


@pytest.mark.parametrize("path", ["/endless", "/large"], ids=["a stream", "a whole answer"])
def test_a_client_that_does_not_read_its_answer_loses_its_place(
    port: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "SLOWEST", 2**24)
    with contextlib.ExitStack() as stack:
        for _ in range(QUICK.connections):
            unread(port, path, stack)
        assert status(answer(port, b"")) == 503
        deadline = time.monotonic() + 15
        while status(answer(port, request())) != 200:
            assert time.monotonic() < deadline, "they keep their places"


def test_a_client_that_reads_slowly_gets_all_of_its_answer(port: int) -> None:
    with contextlib.ExitStack() as stack:
        connection, size = unread(port, "/endless", stack), 0
        begin = time.monotonic()
        while part := connection.recv(2**18):
            size += len(part)
            time.sleep(0.02)
        assert time.monotonic() - begin > QUICK.seconds
    assert size > len(PIECE) * PIECES
