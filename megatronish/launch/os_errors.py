"""Mishaps of the machine that end a run: a full disk, too few open files, too little memory; a sentence for each.

They are no bugs, so no traceback is shown. Any other exception keeps its own.
"""

import contextlib
import errno
import os
import resource
import tempfile
from pathlib import Path
from typing import Final

from megatronish.core.errors import RunError, UserError, without_passwords
from megatronish.core.files import OF_WRITING, remedy_of_writing
from megatronish.launch.terminal import OUTPUT

RESUMES = "a training run resumes from its newest checkpoint"
FEWEST_FILES = 128
"""Descriptors of a rank: 64 suffice for four ranks with pipes, sockets and data."""

REMEDIES: Final = {
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENFILE: "the machine has too many open files; end other programs",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.EACCES: "change its permissions, or name another place",
    errno.EPERM: "change its permissions, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.EISDIR: "a file is needed there; move the folder away, or name another place",
    errno.ENOTDIR: "a folder is needed there; move the file away, or name another place",
    errno.ELOOP: "its symbolic links go round in a circle; name another place",
    errno.EIO: "the disk, its network or the store failed; look at the machine's log, and start again",
    errno.ESTALE: "the network file system has lost it; mount it again",
    errno.EAGAIN: "the machine lets this user start no more processes or threads: raise ulimit -u",
    errno.ENOMEM: "the machine's memory is full; see the next start's first lines for what a rank needs",
}
OF_USER = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
)
"""What another start would meet again, until the user corrects it. A file that is missing may only be late."""
MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "Cannot allocate memory", "bad_alloc")
IN_LIBRARIES: Final = {
    errno.EMFILE: ("Too many open files",),
    errno.EFBIG: ("File too large",),
    errno.ENOSPC: ("No space left on device",),
    errno.EAGAIN: (
        "can't start new thread",
        "unable to start watchdog thread",
        "Resource temporarily unavailable",
        "pthread_create",
    ),
}
"""What C++ and Python say in a RuntimeError where the system has refused something."""
LOST_RANK = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused"),
    *("Socket Timeout", "remote process exited", "pair closure", "closed connection", "Connection was likely closed"),
)
"""What gloo and NCCL say where a rank on the other side has ended."""
TOO_LARGE = (
    "the memory of this rank is full ({reason}); use a smaller --micro-batch-size, --recompute-granularity full, a "
    "higher --zero-stage, or more ranks. --dry-run says what a rank needs"
)


def refuse_few_open_files() -> None:
    """Raise the limit of open files to what ranks need, as far as the system lets; UserError if it does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FEWEST_FILES:
        return
    most = FEWEST_FILES if hard == resource.RLIM_INFINITY else min(hard, FEWEST_FILES)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < FEWEST_FILES:
        raise UserError(f"the limit of open files is {most}, and ranks need {FEWEST_FILES} each: ulimit -n 4096")


def mishap(error: BaseException) -> str | None:
    """One sentence for a mishap of the machine; None for what may be a bug."""
    if isinstance(error, RunError):  # a sentence already, with words of others in it
        return str(error)
    if isinstance(error, OSError) and (sentence := _of_output(error)) is not None:
        return sentence
    # The numbers of a refused path without a path are those of a connection: EPERM is TLS's, too.
    has_remedy = isinstance(error, OSError) and (error.filename is not None or error.errno not in OF_USER)
    if isinstance(error, OSError) and has_remedy and (error.errno in REMEDIES or error.errno in OF_WRITING):
        name = f"{without_passwords(str(error.filename))[:200]}: " if error.filename is not None else ""
        if error.errno in OF_WRITING:
            place = Path(os.fsdecode(error.filename)).parent if isinstance(error.filename, str | bytes) else None
            remedy = f"{remedy_of_writing(error, place)}, and start again; {RESUMES}"
        else:
            remedy = REMEDIES[error.errno]
        return f"{name}{error.strerror or errno.errorcode[error.errno]}; {remedy}"
    reason = str(error).partition("\n")[0]
    if isinstance(error, ImportError | RuntimeError) and (sentence := _of_address_space(reason)) is not None:
        return sentence
    if isinstance(error, RuntimeError):
        for number, words in IN_LIBRARIES.items():
            if any(each in reason for each in words):
                remedy = REMEDIES.get(number) or remedy_of_writing(OSError(number, ""), _temporary_folder())
                return f"{os.strerror(number)}; {remedy}"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(each in reason for each in MEMORY)):
        return TOO_LARGE.format(reason=reason.rpartition("] ")[2][:200] or "no reason was given")
    return None


def _temporary_folder() -> Path | None:
    """The folder for temporary files; None where there is none that can be written to."""
    with contextlib.suppress(OSError):
        return Path(tempfile.gettempdir())
    return None


def _of_output(error: OSError) -> str | None:
    """Sentence for standard output that cannot be written; None if it is something else that failed."""
    if error.filename != OUTPUT:
        return None
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter tries once more at its end
    return f"{OUTPUT} cannot be written: {error.strerror}; {remedy_of_writing(error)}, or send it elsewhere"


def _of_address_space(reason: str) -> str | None:
    """Sentence for a limit on the address space (ulimit -v) that is met; None if there is none, or it is not that."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    words = (*MEMORY, "failed to map segment", *IN_LIBRARIES[errno.EAGAIN])
    if limit == resource.RLIM_INFINITY or not any(each in reason for each in words):
        return None
    return (
        f"the limit on the address space of a process is {limit >> 20:,} MiB (ulimit -v), and libraries and threads "
        "need more than memory itself: ulimit -v unlimited"
    )


def status_of(error: BaseException) -> int:
    """Exit status of a mishap: 2 for what another start would meet again, else 1."""
    return 2 if isinstance(error, OSError) and error.filename is not None and error.errno in OF_USER else 1


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended: that rank is the culprit, and not this one."""
    is_told = isinstance(error, RunError)  # in a sentence that may quote what a server or a disk has said
    return isinstance(error, RuntimeError) and not is_told and any(each in str(error) for each in LOST_RANK)
