"""Chromium without a window, driven through a pipe by its own protocol: it opens pages, and JavaScript runs in them."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = "no Chromium here: apt-get install chromium"
PATIENCE_SECONDS = 120.0


class Page:
    """Open page: `run` evaluates JavaScript, `wait_for` waits until it is true; `complaints` are errors so far."""

    def __init__(self, sends: int, hears: int) -> None:
        self._sends, self._rest, self._number, self._session = sends, b"", 0, ""
        self._hears = hears
        self.complaints: list[str] = []

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._number += 1
        told = {"id": self._number, "method": method, "params": params}
        if self._session:
            told["sessionId"] = self._session
        os.write(self._sends, json.dumps(told).encode() + b"\0")
        while True:
            heard = self._heard()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard
                return dict(heard["result"])
            if heard.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(heard["params"]))

    def _heard(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._hears, 2**16)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def open(self, address: str) -> None:
        """Open an address in a new page."""
        self._session = ""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.command(f"{domain}.enable")
        self.command("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def run(self, code: str) -> Any:
        """The value of an expression, of a promise what it becomes."""
        given = {"expression": code, "returnByValue": True, "awaitPromise": True}
        answer = self.command("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, code: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not self.run(code):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.05)


@contextlib.contextmanager
def browser(folder: Path, *, width: int = 1300, height: int = 2000) -> Iterator[Page]:
    """A browser with a profile in `folder`; it ends with the block."""
    assert CHROMIUM is not None
    its_input, sends = os.pipe()
    hears, its_output = os.pipe()

    def as_3_and_4() -> None:  # where the protocol's pipes must be
        kept = os.dup2(its_input, 13), os.dup2(its_output, 14)
        os.dup2(kept[0], 3)
        os.dup2(kept[1], 4)

    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        f"--window-size={width},{height}",
    ]
    words = [CHROMIUM, *flags, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, close_fds=False, preexec_fn=as_3_and_4, **quiet)
    os.close(its_input)
    os.close(its_output)
    try:
        yield Page(sends, hears)
    finally:
        process.kill()
        process.wait()
        os.close(sends)
        os.close(hears)
