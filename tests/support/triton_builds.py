"""Kernels in Triton compiled ahead of time, for devices that are not here: their registers, spills and accesses."""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ARCHITECTURES = (80, 90, 100)
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
ALIGNED = [["tt.divisibility", 16]]


class Build(NamedTuple):
    """What ptxas has made of a kernel."""

    name: str
    architecture: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str

    def widest(self, access: str) -> int:
        """Bytes of the widest access of a kind: `ld` or `st` of global memory."""
        found = re.findall(rf"\b{access}\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)\b", self.ptx)
        copies = re.findall(r"cp\.async\.c\w\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)", self.ptx)
        widths = [int(count or 1) * int(bits) // 8 for count, bits in found]
        return max([*widths, *(int(each, 16) for each in copies if access == "ld")], default=0)


@cache
def _binary(name: str) -> Path:
    import triton.backends.nvidia

    return Path(triton.backends.nvidia.__file__).parent / "bin" / name


def _described(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """Type of an argument as Triton finds it at a launch: pointers are aligned, ones are constants."""
    if isinstance(value, tuple):
        parts = [_described(each, (*path, i), constants, attributes) for i, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Tensor):
        if value.data_ptr() % 16 == 0:
            attributes[path] = ALIGNED
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value == 1:
        constants[path] = 1
        return "constexpr"
    if value % 16 == 0:
        attributes[path] = ALIGNED
    return "i32" if -(2**31) <= value < 2**31 else "i64"


class Recorded(NamedTuple):
    """A launch that did not take place."""

    kernel: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def build(self, architecture: int) -> Build:
        """Compile it for a device of this architecture."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names, constants, attributes = self.kernel.arg_names, {}, {}
        options = {name: value for name, value in self.named.items() if name not in names}
        signature: dict[str, Any] = {}
        for place, name in enumerate(names):
            if place < len(self.arguments):
                signature[name] = _described(self.arguments[place], (place,), constants, attributes)
            else:
                signature[name], constants[(place,)] = "constexpr", self.named[name]
        source = ASTSource(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [str(_binary("cuobjdump")), "--dump-resource-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (registers,), (stack,) = (re.findall(rf"{word}:(\d+)", said) for word in ("REG", "STACK"))
        name, ptx = self.kernel.fn.__name__, compiled.asm["ptx"]
        # A kernel for sm_100 may have a stack without a spill.
        spills = _spills(ptx, architecture, fuses=self.named["enable_fp_fusion"]) if stack != "0" else 0
        return Build(name, architecture, int(registers), spills, compiled.metadata.shared, ptx)


def _spills(ptx: str, architecture: int, *, fuses: bool) -> int:
    """Bytes that ptxas stores since it has no register for them."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    later = _binary("ptxas-blackwell")
    program = later if architecture >= 100 and later.exists() else _binary("ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(program), "-v", f"--fmad={str(fuses).lower()}", f"--gpu-name={target}", file.name]
        done = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=True)
    (stored,) = re.findall(r"(\d+) bytes spill stores", done.stderr)
    return int(stored)


def launches_of(function: Callable[..., Any], *arguments: Any) -> list[Recorded]:
    """The launches that a call would make, none of which takes place."""
    from unittest.mock import patch

    from triton.runtime.jit import JITFunction

    recorded: list[Recorded] = []

    def launch(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        recorded.append(Recorded(self, given, named))

    with patch.object(JITFunction, "run", launch):
        function(*arguments)
    return recorded
