"""The local folder of a host: in memory that outlives its processes where that has room, else on its disk.

/dev/shm is such memory: a process that is started again finds there what the one before it has written. A token in the
folder says which ranks share it, whatever host names containers have.
"""

import os
import shutil
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from megatronish.checkpoint.folder import steps_in
from megatronish.errors import UserError

MEMORY = Path("/dev/shm")
TOKEN = "host"
PRIVATE = 0o700


def choose_folder(local_save: str | None, run: str, *, needed: int) -> Path:
    """Folder of the run `run` on this host, made if it is missing, for `needed` bytes.

    That of --local-save, else the first of memory and temporary directory that has it already or has the room. One with
    copies is taken without the room, too: fewer hosts need more each, and what is there must be found. UserError if
    none has.
    """
    root = f"megatronish-{os.getuid()}"
    parents = [MEMORY / root, Path(tempfile.gettempdir()) / root] if local_save is None else [Path(local_save)]
    parents.sort(key=lambda parent: (not steps_in(parent / run), not (parent / run).is_dir()))
    told = []
    for parent in parents:
        try:
            free = _free_bytes(parent, run)
            if free >= needed or steps_in(parent / run):
                return make_folder(parent / run)
            told.append(f"{parent} has {free / 1e6:.0f} MB free")
        except OSError as error:
            told.append(f"{parent} cannot be written: {error.strerror}")
    raise UserError(
        f"copies of the state need {needed / 1e6:.0f} MB on each host, twice what its ranks write and keep, and "
        f"{'; '.join(told)}; name a folder with room by --local-save, or leave --save-replicated-interval out"
    )


def token_of(folder: Path) -> str:
    """Token of a folder, the same for every rank that sees this folder; the first rank makes it."""
    token, mine = folder / TOKEN, folder / f".{uuid.uuid4().hex}"
    if not token.exists():
        mine.write_text(uuid.uuid4().hex)
        with suppress(FileExistsError):
            os.link(mine, token)
        mine.unlink()
    return token.read_text()


def remove_folder(folder: Path) -> None:
    """Remove a host's folder of a run, and that around it if it is empty now and not one that the user has named."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.name == f"megatronish-{os.getuid()}":
        with suppress(OSError):
            folder.parent.rmdir()


def _free_bytes(parent: Path, run: str) -> int:
    """Bytes that the run may write in a folder: those that are free, and those of its own older copies."""
    existing = next(path for path in (parent, *parent.parents) if path.exists())
    own = sum(path.stat().st_size for path in (parent / run).rglob("*") if path.is_file())
    return shutil.disk_usage(existing).free + own


def make_folder(folder: Path) -> Path:
    """The folder, made if it is missing; OSError if it cannot be, or if another user has made what lies around it."""
    parent = folder.parent
    with suppress(FileExistsError):
        parent.mkdir(mode=PRIVATE, parents=True)
    if parent.name == f"megatronish-{os.getuid()}" and (parent.is_symlink() or parent.stat().st_uid != os.getuid()):
        raise OSError(None, "another user has made it")
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    return folder
