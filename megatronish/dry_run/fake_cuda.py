"""Library that lets torch believe in a CUDA device, built on demand and loaded before torch is imported.

One file of C++ (fake_cuda.cpp) against torch's headers: a compiler needs a few seconds for it, once for each torch and
version of the file. The library lies in the user's cache folder. No torch in here: whoever imports torch first has
answered its question for a GPU for the whole process.
"""

import ctypes
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from megatronish.core.private import cache_folder, is_own
from megatronish.ops.build import BuildError, find_compiler, find_torch

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
FLAGS = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-shared", "-fPIC")
COMPILER_SECONDS = 600  # of a machine whose cores are busy; else a few


def load_fake_cuda() -> ctypes.CDLL:
    """The library, built if it is not there. BuildError with a sentence where it cannot be built or loaded."""
    if "torch" in sys.modules:
        raise BuildError("torch is imported already, and asks for a GPU only once")
    torch = find_torch()
    library = _built(torch)
    try:
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(torch / "lib" / name), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BuildError(f"{library.name} does not load: {error}") from error


def _built(torch: Path) -> Path:
    """Path of the library for this torch. It appears at once and whole: of several processes each may build it."""
    compiler, source = find_compiler(), SOURCE.read_text(encoding="utf-8")
    parts = (source, " ".join(FLAGS), str(Path(compiler).resolve()), str(torch), (torch / "version.py").read_text())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    output = cache_folder() / f"fake_cuda-{key}.so"
    if not is_own(output):
        with tempfile.TemporaryDirectory(dir=output.parent) as folder:
            fresh = Path(folder) / output.name
            command = [compiler, *FLAGS, "-isystem", f"{torch}/include", str(SOURCE), "-o", str(fresh)]
            command += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
            print("building the stand-in for CUDA that dry runs use, once", file=sys.stderr, flush=True)
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILER_SECONDS)
            except (OSError, subprocess.SubprocessError) as error:
                raise BuildError(str(error).splitlines()[0]) from error
            if done.returncode != 0:
                first = next((line for line in done.stderr.splitlines() if "error" in line), f"{done.returncode}")
                raise BuildError(f"{compiler} does not compile {SOURCE.name}: {first}")
            fresh.replace(output)
    return output
