"""Libraries of operators in C++ for the CPU, each built where it is first called; and the calls of dropout's.

Small files without a header of torch: a compiler needs a second or two for one, once for each user, kind of CPU and
version of the file. The libraries are kept in the user's cache folder. Of processes that start together one builds,
under a lock, and the others wait for it. Where no compiler is found, or it fails, the operators run on their references
in torch, which draw the same masks; that is no error, and the first lines of a run tell the reason.
"""

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.core.private import cache_folder, is_own, locked
from megatronish.ops.build import BuildError, find_compiler

FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
SOURCES = {
    # A product is rounded before it is added: as in torch, whatever the CPU.
    "dropout": (Path(__file__).with_name("dropout.cpp"), "-ffp-contract=off"),
    "windowed": (Path(__file__).with_name("windowed.cpp"), "-ffp-contract=fast"),
}
"""Source of each library, with a flag of its own."""
HEADER = Path(__file__).with_name("floats.h")  # of both
# The CPU's own instructions, wide vectors, and threads: those of these that the compiler knows, the most first.
WISHES = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-march=native",),
    (),
)
COMPILER_SECONDS = 60


class Native(NamedTuple):
    """A loaded library, or the reason why there is none."""

    library: ctypes.CDLL | None
    reason: str | None = None


@cache
def native(name: str = "dropout") -> Native:
    """A library of SOURCES, built and loaded once in a process."""
    if os.environ.get("MEGATRONISH_KERNELS") == "0":
        return Native(None, "MEGATRONISH_KERNELS is 0")
    try:
        return Native(ctypes.CDLL(str(_built(name))))
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        return Native(None, str(error).splitlines()[0])


def _built(name: str) -> Path:
    """Path of the library for this CPU, compiled where it is not there yet."""
    source, *flags = SOURCES[name]
    compiler = find_compiler()
    real = Path(compiler).resolve()
    parts = (
        source.read_text(encoding="utf-8"),
        HEADER.read_text(encoding="utf-8"),
        repr((FLAGS, flags, WISHES)),
        f"{real} {real.stat().st_size} {real.stat().st_mtime_ns}",
        _cpu(),
    )
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    output = cache_folder() / f"{name}-{key}.so"
    if not is_own(output):
        with locked(output.with_suffix(".lock")):
            if not is_own(output):  # built by another process, while this one waited
                _compile([compiler, *FLAGS, *flags], source, output)
    return output


def _compile(start: Sequence[str], source: Path, output: Path) -> None:
    """The file appears at once and whole: another process may not find a part of it."""
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        fresh = Path(folder) / output.name
        for wishes in WISHES:
            command = [*start, *wishes, str(source), "-o", str(fresh)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILER_SECONDS)
            if done.returncode == 0:
                fresh.replace(output)
                return
    raise BuildError(f"{start[0]} does not compile {source.name}: {done.stderr.strip() or done.returncode}")


def _cpu() -> str:
    """What -march=native depends on: nodes of several kinds may share a home folder."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return f"{platform.machine()} {platform.processor()}"
    fields = ("vendor_id", "cpu family", "model", "flags", "Features")
    lines = re.findall(rf"^(?:{'|'.join(fields)})\s*:.*$", path.read_text().split("\n\n")[0], re.MULTILINE)
    return "\n".join(lines)


_NAMES = {torch.float32: "dropout_add_float", torch.bfloat16: "dropout_add_bfloat16"}


class _Hidden(ctypes.Structure):
    """The struct `Hidden` of dropout.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "samples", "positions")),
        *((name, ctypes.c_int64) for name in ("num_positions", "num_samples", "columns")),
        ("threshold", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class _Tile(ctypes.Structure):
    """The struct `Tile` of dropout.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "samples", "documents", "slopes")),
        *((name, ctypes.c_int64) for name in ("num_samples", "heads", "num_queries", "num_keys")),
        *(
            (name, ctypes.c_int64)
            for name in ("first_head", "first_query", "first_key", "window", "seq_length", "causal")
        ),
        ("scale", ctypes.c_float),
        ("threshold", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def why_not() -> str | None:
    """The reason why dropout does not run in C++, None where it does."""
    return native().reason


def can_add(x: Tensor, residual: Tensor | None) -> bool:
    """Whether `dropout_add` of these runs in C++."""
    return x.dtype in _NAMES and (residual is None or residual.dtype == x.dtype) and native().library is not None


def can_softmax(scores: Tensor) -> bool:
    """Whether the softmax of these scores runs in C++."""
    return scores.dtype == torch.float32 and native().library is not None


def dropout_add(
    x: Tensor, residual: Tensor | None, names: tuple[Tensor, Tensor, Tensor], threshold: int, factor: float
) -> Tensor:
    """[s, B, D] of x and residual -> [s, B, D]; `names` are the keys, samples and positions of the hashes."""
    assert residual is None or residual.shape == x.shape, "the sum has the shape of both"
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    keys, samples, positions = (each.contiguous() for each in names)
    assert (*positions.shape, *samples.shape, x.shape[-1]) == x.shape, "a row for each position of each sample"
    out = torch.empty_like(x)
    where = _Hidden(*_pointers(keys, samples, positions), *x.shape, threshold, factor, torch.get_num_threads())
    _call(_NAMES[x.dtype], where, (x, residual, out))
    return out


def softmax_dropout(
    scores: Tensor, others: tuple[Tensor, ...], place: Sequence[Any], threshold: int, factor: float
) -> None:
    """Forward with `others` (lse), backward with (grads, lse, means); `place` as in the operators' schemas."""
    keys, samples, documents, slopes, *firsts, window_size, causal, scale = place
    tensors = [None if each is None else each.contiguous() for each in (keys, samples, documents, slopes)]
    assert all(each.is_contiguous() for each in (scores, *others)), "tiles are contiguous"
    sight = (2**62 if window_size is None else window_size, 0 if documents is None else documents.shape[1], causal)
    ending = (scale, threshold, factor, torch.get_num_threads())
    where = _Tile(*_pointers(*tensors), *scores.shape, *firsts, *sight, *ending)
    _call("softmax_dropout" if len(others) == 1 else "softmax_dropout_backward", where, (scores, *others))


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if each is None else each.data_ptr() for each in tensors]


def _call(name: str, where: ctypes.Structure, tensors: Sequence[Tensor | None]) -> None:
    function = getattr(native().library, name)
    function(ctypes.byref(where), *map(ctypes.c_void_p, _pointers(*tensors)))
