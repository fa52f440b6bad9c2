"""A disk that stops answering, as a network file system does whose server is gone: ext4 in a file, frozen at will.

Who writes to it waits in the kernel, in state D, and not even SIGKILL ends that. Needs root and a loop device of Linux.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class FrozenDisk:
    """A mounted disk at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Nothing that is written gets an answer, until the end of the context."""
        _run("fsfreeze", "--freeze", str(self.folder))
        try:
            yield
        finally:
            _run("fsfreeze", "--unfreeze", str(self.folder))


@contextlib.contextmanager
def disk_that_freezes(folder: Path) -> Iterator[FrozenDisk]:
    """A disk, mounted in a new folder; the test is skipped where that is not permitted."""
    image, mounted = folder / "disk.img", folder / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    try:
        _run("mkfs.ext4", "-q", str(image))
        _run("mount", "-o", "loop", str(image), str(mounted))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    disk = FrozenDisk(mounted)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], capture_output=True, check=False)
        image.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
