"""What the GPU report needs besides torch, and which of it is not here. Nothing is installed."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = ("numpy", "einops", "tyro", "docstring_parser", "typeguard", "tqdm")
"""What megatronish imports while it trains."""
TESTS = (*PACKAGE, "pytest")
OPTIONAL = {
    "triton": "kernels in Triton and torch.compile are not tried",
    "transformer_engine": "no contender of TransformerEngine",
    "liger_kernel": "no contender of Liger",
    "torchtitan": "no contender of torchtitan",
}
COMPILER, C_COMPILER = "nvcc", "gcc"


def is_here(name: str) -> bool:
    """Whether a module can be imported, or a compiler be called: CUDA's, or the C compiler that Triton looks for."""
    if name == C_COMPILER:
        return any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else [C_COMPILER, "clang"]))
    if name == COMPILER:
        places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        return shutil.which(COMPILER, path=os.pathsep.join(os.environ.get("PATH", "").split(os.pathsep) + [
            f"{place}/bin" for place in places if place
        ])) is not None  # fmt: skip
    return importlib.util.find_spec(name) is not None


def absent(names: Sequence[str]) -> list[str]:
    """Those of the names that are not here."""
    return [name for name in names if not is_here(name)]


def told() -> list[str]:
    """A sentence for each thing that is not here, and what is lost by it."""
    lines = [f"{name} is not here: nothing that imports megatronish can run" for name in absent(PACKAGE)]
    lines += [f"{name} is not here: no test can run" for name in absent(("pytest",))]
    lines += [f"{COMPILER} is not here: the CUDA kernels are not built"] if absent((COMPILER,)) else []
    if absent((C_COMPILER,)):
        lines.append(f"{C_COMPILER} is not here: kernels in Triton and torch.compile cannot start")
    return lines + [f"{name} is not here: {loss}" for name, loss in OPTIONAL.items() if not is_here(name)]


def add_wheels(folder: Path) -> list[str]:
    """Wheels of a folder, in front of what Python imports: those without compiled code are archives it can read."""
    wheels = sorted(str(path.resolve()) for path in folder.glob("*-none-any.whl"))
    sys.path[:0] = wheels
    importlib.invalidate_caches()
    return wheels
