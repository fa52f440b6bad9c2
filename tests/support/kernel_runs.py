"""Access of tests to the kernels: on the CPU under the emulator and its checker, and on a GPU if there is one.

On the CPU they are the operators of a second namespace, with the same references, fakes and gradients. Every call there
is watched: a race, an access out of bounds and the like raise RuntimeError (kernels/emulator/README.md).
"""

import ctypes
import shutil
from functools import cache
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from megatronish.ops.build import build_emulated
from megatronish.ops.library import define, load_kernels
from megatronish.ops.report import FAMILIES

NAMESPACE = "megatronish_emulated"
LENGTHS = (1, 2, 31, 33, 127, 129, 1025, 4097, 16384)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ORDERS = ("ascending", "descending", "random")
# Half the distance of neighbours, relative; that of fp16's numbers below the normal ones, and all of the others' such.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126}

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("c++") is None,
    reason="kernels are compiled for the CPU by a C++ compiler, and none is here",
)
# For `@pytest.mark.parametrize("where", PLACES)`: the same test on the CPU and on a GPU.
PLACES = (pytest.param("cpu", marks=needs_compiler), pytest.param("cuda", marks=pytest.mark.gpu))


class Kernels(NamedTuple):
    """The operators, `ops.<name>`, of which it is certain that they run as kernels, for tensors of `device`."""

    ops: Any
    device: torch.device


def kernels(
    where: Literal["cpu", "cuda"], *, order: str = "ascending", seed: int = 0, multiprocessors: int = 2
) -> Kernels:
    """The order of lanes, warps and blocks is one of ORDERS; it and the multiprocessors are the emulator's alone."""
    if where == "cuda":
        reason = load_kernels()
        if reason is not None:
            pytest.skip(f"this runs on a GPU, but {reason}")
        return Kernels(torch.ops.megatronish, torch.device("cuda"))
    library = _emulated_library()
    library.emulator_set_order(ctypes.c_int(ORDERS.index(order)), ctypes.c_ulonglong(seed))
    library.emulator_set_multiprocessors(ctypes.c_int(multiprocessors))
    return Kernels(getattr(torch.ops, NAMESPACE), torch.device("cpu"))


@cache
def _emulated_library() -> ctypes.CDLL:
    path = str(build_emulated())
    families = [family for family in FAMILIES if family.in_cuda]
    for family in families:
        define(family, namespace=NAMESPACE)
    torch.ops.load_library(path)
    for family in families:
        for each in family.operators:
            name = f"{NAMESPACE}::{each.name}"
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"), f"no kernel implements {name}"
    return ctypes.CDLL(path)


def misaligned(x: Tensor) -> Tensor:
    """The same values, contiguous, one element beyond a 16-byte boundary."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def assert_rounded(found: Tensor, exact: Tensor, *, slack: Tensor | float) -> None:
    """`found` is `exact` [fp64] up to its own dtype's rounding, and `slack` for that of the arithmetic before it."""
    dtype = found.dtype
    error = (found.double() - exact).abs()
    allowed = exact.abs() * ROUNDING[dtype] + SMALLEST[dtype] + slack
    worst = (error - allowed).argmax() if error.numel() else None
    assert (error <= allowed).all(), (
        f"{found.flatten()[worst]} is not {exact.flatten()[worst]}, element {worst} of {tuple(found.shape)} in {dtype}"
    )
