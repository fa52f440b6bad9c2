"""Server of a run's page on this machine alone, with contents that are read again for each request."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatronish.core.errors import UserError
from megatronish.report.page.contents import curves_of
from megatronish.report.page.write import Kept, contents_as_json, encoded, page_of

HERE = "127.0.0.1"
NAMES = (HERE, "localhost")
"""Hosts of a request: one under another name comes from a page that has led its name here (DNS rebinding)."""


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET / with the page, and GET /contents.json with what it shows."""

    def __init__(self, *given: object, runs: Sequence[Path], curves: Kept, every: int) -> None:
        self.runs, self.curves, self.every = runs, curves, every
        super().__init__(*given)  # type: ignore[arg-type]  # it answers in here

    def do_GET(self) -> None:
        """Answer; 403 to another host's name, 404 to another path, 500 where the folder is no run any more."""
        if self.headers.get("Host", "").partition(":")[0] not in NAMES:
            self.send_error(403, "this page is for this machine")
            return
        try:
            if self.path == "/":
                self._send("text/html; charset=utf-8", page_of(self.runs, self.curves, refreshed_every=self.every))
            elif self.path == "/contents.json":
                self._send("application/json", contents_as_json(self.runs, self.curves))
            else:
                self.send_error(404)
        except UserError as error:
            self.send_error(500, "no page of the run", str(error))  # the first line of an answer is Latin-1
        except (BrokenPipeError, ConnectionResetError):
            pass  # the browser has left

    def _send(self, kind: str, text: str) -> None:
        body = encoded(text)
        self.send_response(200)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: the terminal shows the run."""


@contextmanager
def served(runs: Sequence[Path], *, port: int, every: int) -> Iterator[str]:
    """The page's address, for as long as the block runs. `port` 0 is any that is free; UserError if it is taken."""
    curves = {run: curves_of(run, hurries=True) for run in runs}
    try:
        server = ThreadingHTTPServer((HERE, port), partial(PageHandler, runs=runs, curves=curves, every=every))
    except OSError as error:
        raise UserError(
            f"--port {port} cannot be used ({error.strerror}); choose another, or 0 for a free one"
        ) from error
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{HERE}:{server.server_port}/"
        finally:
            server.shutdown()
