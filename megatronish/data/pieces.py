"""Pieces of input files: whole files, bytes of JSON lines, row groups of Parquet; and their division into tasks.

Input files are laid end to end, in their order, and cut at N - 1 places of equal distance. A place inside of a plain
file of JSON lines moves to the next line, one inside of a Parquet file to the next row group. A file that can only be
read from its beginning (compressed, or a JSON array) goes whole to the task in which its middle lies. So the pieces of
task 0, then those of task 1 and so on, are the files in their order: whatever the number of tasks is.
"""

import hashlib
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import BinaryIO, NamedTuple

from megatronish.core.errors import UserError
from megatronish.core.remote import Location, RemotePath, location
from megatronish.data.inputs import (
    ARRAY_OF_OBJECTS,
    BOM,
    HEAD_BYTES,
    is_parquet,
    open_input,
    optional_library,
    unpacking,
)
from megatronish.data.stores import ask, open_binary

NUM_SAMPLES, SAMPLE_BYTES = 32, 4096
"""Pieces of a file that are hashed: a hash of terabytes would take hours. Its time of change is compared, too."""
BLOCK_BYTES = 1 << 20


class InputPiece(NamedTuple):
    """Part of an input file: from byte, or row group of Parquet, `start` to `end`; None is the end of the file.

    `num_bytes` is its size, of row groups about.
    """

    path: str
    start: int = 0
    end: int | None = None
    num_bytes: int = 0


class InputFile(NamedTuple):
    """An input file as it was when a plan was made: its size, when it was changed, and a hash of parts of it."""

    path: str
    size: int
    changed_ns: int
    digest: str

    @classmethod
    def of(cls, path: str, *, what: str = "--input") -> "InputFile":
        """Facts of a file as it is now; OSError if it cannot be read. `what` is what it is to the user.

        Of an object the store's own hash or ETag takes the place of a hash of parts, where it has one.
        """
        place = location(path)
        if isinstance(place, RemotePath):
            facts, identity = ask(place, place.stat, what=what), ask(place, place.identity, what=what)
            if identity:
                return cls(path, facts.st_size, _nanoseconds(facts.st_mtime), identity)
            with open_binary(place) as file:
                return cls(path, facts.st_size, _nanoseconds(facts.st_mtime), _hash_of_parts(file, facts.st_size))
        with place.open("rb") as file:
            state = os.fstat(file.fileno())
            return cls(path, state.st_size, state.st_mtime_ns, _hash_of_parts(file, state.st_size))


def _nanoseconds(seconds: float) -> int:
    """A time that a store has given, which is exact to a millionth of a second at most."""
    return round(seconds * 1e6) * 1000


def _hash_of_parts(file: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    last = max(size - SAMPLE_BYTES, 0)
    for start in sorted({last * number // (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES)}):
        file.seek(start)
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


class _Cut(NamedTuple):
    """A place at which a file is cut, and the bytes of the file before it."""

    place: int
    num_bytes: int


def cut_into_tasks(files: Sequence[InputFile], num_tasks: int) -> list[list[InputPiece]]:
    """Pieces of each task, of about equal bytes. A task has none where there are more tasks than lines or files."""
    total = sum(file.size for file in files)
    targets = [total * number // num_tasks for number in range(1, num_tasks)]
    tasks: list[list[InputPiece]] = [[] for _ in range(num_tasks)]
    before = task = 0
    for file in files:
        inside = [target - before for target in targets if before < target < before + file.size]
        cuts = _cuts(file, inside)
        if cuts is None:  # one piece, which lies where its middle is
            middle = before + file.size // 2
            task = sum(target <= middle for target in targets)
            tasks[task].append(InputPiece(file.path, num_bytes=file.size))
        else:
            task = sum(target <= before for target in targets)
            places = [_Cut(0, 0), *cuts]
            for start, end in zip(places, [*cuts, None], strict=True):
                if end is None:
                    tasks[task].append(InputPiece(file.path, start.place, None, file.size - start.num_bytes))
                elif start.place != end.place:
                    tasks[task].append(InputPiece(file.path, start.place, end.place, end.num_bytes - start.num_bytes))
                task += 1
        before += file.size
    return tasks


def _cuts(file: InputFile, targets: Sequence[int]) -> list[_Cut] | None:
    """The place next to each target at which the file may be cut; None for a file that stays whole."""
    path = location(file.path)
    if not targets:
        return []
    if is_parquet(path):
        borders = _row_groups(path, file.size)
        return [min(borders, key=lambda border: abs(border.num_bytes - target)) for target in targets]
    with unpacking(path, lambda: "near its beginning"), open_input(path) as opened:
        head = opened.raw.peek(HEAD_BYTES).removeprefix(BOM)  # type: ignore[attr-defined]
        if opened.raw is not opened.text or ARRAY_OF_OBJECTS.match(head):
            return None
        places = [_next_line(opened.raw, target, file.size) for target in targets]
        return [_Cut(place, place) for place in places]


def _next_line(file: BinaryIO, place: int, size: int) -> int:
    """The first byte of the line that begins at `place` or after it; the size of the file if there is none."""
    file.seek(place - 1)
    while block := file.read(BLOCK_BYTES):
        if (newline := block.find(b"\n")) >= 0:
            return file.tell() - len(block) + newline + 1
    return size


def _row_groups(path: Location, size: int) -> list[_Cut]:
    parquet = optional_library("pyarrow.parquet", extra="parquet", what="Parquet files")
    arrow = optional_library("pyarrow", extra="parquet", what="Parquet files")
    try:
        with open_binary(path) as opened, parquet.ParquetFile(opened) as file:
            groups = [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"--input {path} cannot be read: {error}; copy it again") from error
    sizes = [size * before // max(sum(groups), 1) for before in accumulate(groups, initial=0)]
    return [_Cut(place, before) for place, before in enumerate(sizes)]


def lines_before(piece_start: int, path: str) -> int:
    """Lines of a file before a byte at which a line begins. It is asked only where a line is bad: it takes a second a
    gigabyte."""
    count, left = 0, piece_start
    with open_binary(location(path)) as file:
        while left and (block := file.read(min(BLOCK_BYTES, left))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count
