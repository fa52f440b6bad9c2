"""What Triton needs of the machine that it compiles on: itself, a C compiler, and Python's headers.

CUDA builds of torch bring Triton along, and Triton brings the compiler of its kernels. But what loads and starts them
it builds from C at its first launch, those of FlexAttention and torch.compile, too: without, that launch ends the run.
"""

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

COMPILERS = ("gcc", "clang")  # that Triton looks for where CC names none


@cache
def why_triton_cannot_compile() -> str | None:
    """The reason why, in one sentence with what helps, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    named = os.environ.get("CC")
    if not any(map(shutil.which, COMPILERS if named is None else (named,))):
        told = "Triton finds no C compiler" if named is None else f"Triton finds no C compiler CC={named!r}"
        return f"{told}: install gcc, or name one in CC"
    if not (_headers() / "Python.h").exists():
        return f"Triton's C compiler needs Python's headers, and {_headers()} has none: install python3-dev"
    return None


def _headers() -> Path:
    """Where Triton's compiler looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))
