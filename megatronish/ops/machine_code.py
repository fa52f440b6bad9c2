"""Machine code of compiled kernels: how many bytes their loads and stores of global memory move, by kernel.

A cubin is an ELF file with a section of code for each kernel. An instruction has 128 bits, since sm_70: the lowest
twelve say what it does, and of a load or store three say its width. So this takes no disassembler, which not every
CUDA toolkit brings; it was compared with NVIDIA's, and found the same numbers (docs/LOG.md).
"""

import struct
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

OPERATION, LOAD, STORE = 0xFFF, 0x981, 0x986  # LDG and STG
WIDTHS = (1, 1, 2, 2, 4, 8, 16)  # bytes, by the three bits
SECTIONS, OF_SECTIONS = 0x28, 0x3A  # where an ELF header has the place of section headers; their size, number and names


class Accesses(NamedTuple):
    """Loads and stores of global memory in a kernel: the number of instructions by their bytes."""

    loads: Counter[int]
    stores: Counter[int]


def accesses_of(cubin: bytes) -> dict[str, Accesses]:
    """What each kernel of a cubin has, by its mangled name."""
    found: dict[str, Accesses] = {}
    for name, code in _sections(cubin):
        if not name.startswith(".text."):
            continue
        accesses = found[name.removeprefix(".text.")] = Accesses(Counter(), Counter())
        for low, high in struct.iter_unpack("<QQ", code):
            kind = {LOAD: accesses.loads, STORE: accesses.stores}.get(low & OPERATION)
            if kind is not None:
                kind[WIDTHS[high >> 9 & 7]] += 1
    return found


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit ELF file."""
    (place,) = struct.unpack_from("<Q", elf, SECTIONS)
    size, number, of_names = struct.unpack_from("<HHH", elf, OF_SECTIONS)
    # Each header begins with the place of its name among names, and has at 24 and 32 the place and size of its content.
    headers = [struct.unpack_from("<I20xQQ", elf, place + i * size) for i in range(number)]
    names = headers[of_names][1]
    for name, begin, length in headers:
        yield elf[names + name : elf.index(b"\0", names + name)].decode(), elf[begin : begin + length]
