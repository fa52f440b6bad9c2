"""Library of the operators' C++ implementations for the CPU, built where one of them is first called.

One small file without a header of torch: a compiler needs about a second for it, once for each user, kind of CPU and
version of the file. The library is kept in the user's cache folder. Of processes that start together one builds, under
a lock, and the others wait for it. Where no compiler is found, or it fails, the operators run on their references in
torch, which draw the same masks; that is no error, and the first lines of a run tell the reason.
"""

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatronish.core.private import cache_folder, is_own, locked
from megatronish.ops.build import BuildError, find_compiler

SOURCE = Path(__file__).with_name("dropout.cpp")
# A product is rounded before it is added: as in torch, whatever the CPU.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# The CPU's own instructions, wide vectors, and threads: those of these that the compiler knows, the most first.
WISHES = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-march=native",),
    (),
)
COMPILER_SECONDS = 60


class Native(NamedTuple):
    """The loaded library, or the reason why there is none."""

    library: ctypes.CDLL | None
    reason: str | None = None


@cache
def native() -> Native:
    """The library, built and loaded once in a process."""
    if os.environ.get("MEGATRONISH_KERNELS") == "0":
        return Native(None, "MEGATRONISH_KERNELS is 0")
    try:
        return Native(ctypes.CDLL(str(_built())))
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        return Native(None, str(error).splitlines()[0])


def _built() -> Path:
    """Path of the library for this CPU, compiled where it is not there yet."""
    compiler, source = find_compiler(), SOURCE.read_text(encoding="utf-8")
    real = Path(compiler).resolve()
    parts = (source, repr((FLAGS, WISHES)), f"{real} {real.stat().st_size} {real.stat().st_mtime_ns}", _cpu())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    output = cache_folder() / f"dropout-{key}.so"
    if not is_own(output):
        with locked(output.with_suffix(".lock")):
            if not is_own(output):  # built by another process, while this one waited
                _compile(compiler, output)
    return output


def _compile(compiler: str, output: Path) -> None:
    """The file appears at once and whole: another process may not find a part of it."""
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        fresh = Path(folder) / output.name
        for wishes in WISHES:
            command = [compiler, *FLAGS, *wishes, str(SOURCE), "-o", str(fresh)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILER_SECONDS)
            if done.returncode == 0:
                fresh.replace(output)
                return
    raise BuildError(f"{compiler} does not compile {SOURCE.name}: {done.stderr.strip() or done.returncode}")


def _cpu() -> str:
    """What -march=native depends on: nodes of several kinds may share a home folder."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return f"{platform.machine()} {platform.processor()}"
    fields = ("vendor_id", "cpu family", "model", "flags", "Features")
    lines = re.findall(rf"^(?:{'|'.join(fields)})\s*:.*$", path.read_text().split("\n\n")[0], re.MULTILINE)
    return "\n".join(lines)
