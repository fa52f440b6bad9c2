"""A real HTTP server with OpenAI's interface, of which a test says what its models answer and how it fails."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Body = dict[str, Any]


class Reply(NamedTuple):
    """A reply of another kind than an answer. Status 0 closes the connection."""

    status: int
    body: str = ""
    headers: tuple[tuple[str, str], ...] = ()


def chat(text: Any, reason: str = "stop") -> str:
    """The body of an answer."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]})


class ChatServerOfTests(ThreadingHTTPServer):
    """Answers each chat by `answer(body)`, a text or a Reply. `asked` has all bodies, `keys` the keys of all."""

    daemon_threads = True

    def __init__(self, answer: Callable[[Body], str | Reply], models: tuple[str, ...] | Reply) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.models = answer, models
        self.asked: list[Body] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """A client that was killed is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: ChatServerOfTests

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        models = self.server.models
        with self.server.lock:
            self.server.keys.append(self.headers.get("Authorization"))
        if isinstance(models, tuple) and not isinstance(models, Reply):
            models = Reply(200, json.dumps({"object": "list", "data": [{"id": name} for name in models]}))
        self.send(models if self.path == "/v1/models" else Reply(404, '{"error": "no such path"}'))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
        found = self.server.answer(body)
        self.send(found if isinstance(found, Reply) else Reply(200, chat(found)))

    def send(self, reply: Reply) -> None:
        if reply.status == 0:
            self.connection.close()
            return
        content = reply.body.encode()
        self.send_response(reply.status)
        for name, value in (*reply.headers, ("Content-Length", str(len(content)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def chat_server(
    answer: Callable[[Body], str | Reply], models: tuple[str, ...] | Reply = ("good", "bad", "judge")
) -> Iterator[ChatServerOfTests]:
    """A server in a thread of this process."""
    server = ChatServerOfTests(answer, models)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
