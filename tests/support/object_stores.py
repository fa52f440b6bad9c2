"""A server of S3 on loopback for tests, where its packages are installed."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from ranks import wait_until

from megatronish.core.remote import RemotePath


class Store(NamedTuple):
    """A place for checkpoints, and what a process needs in its environment to reach it."""

    url: str
    environ: dict[str, str]

    def names(self) -> list[str]:
        """Names of what lies there, those of checkpoints without the number of their attempt."""
        return names_in(RemotePath(self.url))


def names_in(folder: RemotePath) -> list[str]:
    """Names of what lies in a folder, those of checkpoints without the number of their attempt."""
    names = sorted({name.partition("/")[0] for name in folder.sizes()})
    return [name.partition(".")[0] if name.startswith("step_") else name for name in names]


@contextmanager
def serving_s3(path: Path) -> Iterator[Store]:
    """A server of S3 on loopback, with one empty bucket; its log is written into the path."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environ = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    log = path.open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
    )
    with pytest.MonkeyPatch.context() as patch, log:
        for name, value in environ.items():
            patch.setenv(name, value)
        try:
            assert wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, timeout=60)
            import s3fs

            s3fs.S3FileSystem.clear_instance_cache()  # one of a server before this one knows its address
            s3fs.S3FileSystem().mkdir("bucket")
            yield Store("s3://bucket", environ)
        finally:
            server.kill()
            server.wait()
