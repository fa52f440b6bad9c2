"""Which ranks share a folder: each makes a file of its own in it, and looks for those of the others.

So what counts is the folder, and not how hosts and containers are named: two containers of one name have memories of
their own, and two of different names may share one.
"""

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatronish.checkpoint.all_or_none import from_all, from_one
from megatronish.checkpoint.replicated.folders import make_folder
from megatronish.parallel.mesh import Axis


class Shared(NamedTuple):
    """A folder that some ranks share: the first of them, and the number of the folder among those of that rank."""

    rank: int
    number: int


def share(folders: Sequence[Path], axis: Axis) -> list[Shared | str]:
    """What this rank shares in each of its folders, which are made, or why a folder cannot be written. Collective."""
    nonce = from_one(axis, lambda: uuid.uuid4().hex)
    names = [f".host_{nonce}_{axis.rank}_{number}" for number in range(len(folders))]
    made = [_made(folder, name) for folder, name in zip(folders, names, strict=True)]
    counts = from_all(axis, lambda: len(folders))
    shared = from_all(axis, partial(_first_seen, folders, made, nonce, counts))[axis.rank]
    for folder, name in zip(folders, names, strict=True):  # all have looked
        with suppress(OSError):
            (folder / name).unlink()
    from_all(axis, lambda: None)  # and all have removed theirs
    return shared


def _made(folder: Path, name: str) -> str | None:
    """Make the folder and a file in it; why not, if that fails."""
    try:
        (make_folder(folder) / name).touch()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _first_seen(
    folders: Sequence[Path], made: Sequence[str | None], nonce: str, counts: Sequence[int]
) -> list[Shared | str]:
    """In each folder the first file that is there. Asked for by name: listings may be old on network file systems."""
    found: list[Shared | str] = []
    for folder, error in zip(folders, made, strict=True):
        every = (Shared(rank, number) for rank, count in enumerate(counts) for number in range(count))
        seen = (each for each in every if os.path.lexists(folder / f".host_{nonce}_{each.rank}_{each.number}"))
        found.append(error if error is not None else next(seen, "its files cannot be seen"))
    return found
