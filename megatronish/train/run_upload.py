"""Run folders on object storage (--run-dir s3://...): written on a disk, copied to the store.

Logs grow line by line, and objects are replaced as a whole. So the files of a run lie in a local folder, whose name is
made of the URL, and those that have changed are copied before each checkpoint is written and when the run ends: what a
store says of a run is never older than the checkpoint from which it resumes. A start on any machine begins with the
files that the store has. Checkpoints are not part of this: ranks write them into the store directly.
"""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from megatronish.checkpoint.remote import RemotePath, error_of_start

CHECKPOINTS = "checkpoints"
LINES = (".jsonl", ".log")


class RunMirror:
    """The copy of a local run folder in a store. One rank of each machine calls its methods."""

    def __init__(self, folder: Path, place: RemotePath) -> None:
        self.folder, self.place = folder, place
        self._copied: dict[str, tuple[int, int]] = {}  # change time and size of the files as they were copied

    def fetch(self) -> None:
        """Replace local files by those of the store; UserError if they cannot be read, RunError in an outage.

        A local file that continues that of the store stays: a run that was killed here has written it, and may
        resume from a copy nearby of a step after the last checkpoint.
        """
        try:
            for name, size in self.place.sizes().items():
                if name.partition("/")[0] != CHECKPOINTS and not self._is_ahead(name, size):
                    (self.place / name).download_file(self.folder / name)
                    self._copied[name] = _state(self.folder / name)
        except OSError as error:
            what = f"--run-dir {self.place} cannot be copied to {self.folder}"
            raise error_of_start(what, error, remedy="correct that or choose another run folder") from error

    def _is_ahead(self, name: str, size: int) -> bool:
        """Whether a local file is a longer version of the store's: for lines by their bytes, else by its time."""
        local, remote = self.folder / name, self.place / name
        if not local.is_file():
            return False
        if local.suffix not in LINES:
            return local.stat().st_mtime > remote.stat().st_mtime
        with tempfile.TemporaryDirectory() as aside:
            if local.stat().st_size <= size:
                return False
            remote.download_file(Path(aside) / local.name)
            return _begins_with(local, Path(aside) / local.name)

    def keep_back(self) -> None:
        """Leave what an earlier start has left here as it is: another machine has the files of rank 0 now."""
        for path in self.folder.rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    self._copied[path.relative_to(self.folder).as_posix()] = _state(path)

    def copy(self) -> None:
        """Copy the files that have changed. What fails is printed, and tried again the next time."""
        try:
            for path in sorted(self.folder.rglob("*")):
                self._copy(path)
        except OSError as error:
            told = f"files of {self.folder} were not copied to {self.place}: {error.strerror or error}"
            tqdm.write(f"{told}; it is tried again before the next checkpoint", file=sys.stderr)

    def _copy(self, path: Path) -> None:
        name = path.relative_to(self.folder).as_posix()
        if name.partition("/")[0] == CHECKPOINTS or path.name.startswith("."):
            return
        try:
            if not path.is_file() or self._copied.get(name) == (state := _state(path)):
                return
            (self.place / name).upload(path)
        except FileNotFoundError:
            if path.exists():  # or it was replaced meanwhile
                raise
            return
        self._copied[name] = state


def _begins_with(longer: Path, shorter: Path) -> bool:
    """Whether a file begins with the bytes of another."""
    with longer.open("rb") as one, shorter.open("rb") as other:
        while expected := other.read(2**20):
            if one.read(len(expected)) != expected:
                return False
    return True


def _state(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size
