"""Journal of answers and verdicts: a file of JSON lines that grows record by record, and that a kill cannot break.

Each record has the digest of the request that it answers. A command that is started again takes a record only for the
very same request: other questions, models or settings have other digests, so nothing is mixed, and nothing is lost.
"""

import fcntl
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatronish.core.errors import UserError
from megatronish.core.files import naming, unwritten

DIGEST = "request"
"""Key of the digest in a record."""


class Journal:
    """Records by the digest of their request. One process at a time writes; UserError for a second one.

    Each record has the fields `needed`: a line without them is counted as unreadable, and its request is sent again.
    """

    def __init__(self, path: Path, *, needed: Collection[str]) -> None:
        self.path, self._needed = path, {DIGEST, *needed}
        self.records: dict[str, dict[str, Any]] = {}
        self.used: set[str] = set()
        self.num_unreadable = 0
        try:
            self._file = path.open("ab", buffering=0)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise UserError(
                    f"another command is writing {path}; wait until it has ended, or choose another --output"
                ) from None
            except OSError:
                pass  # some network file systems have no locks
            self._read()
        except OSError as error:
            raise unwritten(f"--output {path.parent}", path, error) from error

    def _read(self) -> None:
        """Take the records of earlier commands, and cut off a last line that a kill has left without its end."""
        content = self.path.read_bytes()
        whole, _, cut = content.rpartition(b"\n")
        for line in whole.splitlines():
            try:
                record = json.loads(line)
                if not self._needed <= record.keys():
                    raise ValueError
                self.records[record[DIGEST]] = record
            except (ValueError, TypeError, AttributeError, RecursionError):
                self.num_unreadable += 1
        if cut:
            self._file.truncate(len(content) - len(cut))

    def find(self, digest: str) -> dict[str, Any] | None:
        """The record of a request, which is counted as used; None if it was not answered yet."""
        self.used.add(digest)
        return self.records.get(digest)

    def add(self, digest: str, record: dict[str, Any]) -> dict[str, Any]:
        """Write a record to the disk. UserError or RunError if the disk refuses it, of which no part stays then."""
        record = {DIGEST: digest, **record}
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        end, done = self._file.seek(0, os.SEEK_END), 0
        try:
            with naming(self.path):
                while done < len(line):  # a disk that becomes full takes a part first
                    done += self._file.write(line[done:])
                os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(end)
            raise unwritten(f"--output {self.path}", self.path, error) from error
        self.used.add(digest)
        self.records[digest] = record
        return record

    @property
    def num_others(self) -> int:
        """Records of other questions, models or settings, which stay in the file."""
        return len(self.records.keys() - self.used)

    def close(self) -> None:
        """Close the file, which unlocks it."""
        self._file.close()
