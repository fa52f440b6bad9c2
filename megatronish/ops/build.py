"""Compilation of the kernels: for CUDA, and for the CPU under the emulator.

Used by setup.py, `make kernels` (`python -m megatronish.ops.build`) and the tests; an import never compiles anything.
Object files are cached in build/kernels under a hash of their inputs, so a second build compiles only what changed.
"""

import argparse
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megatronish.core.private import private_folder

# Machine code of compiled kernels: how many bytes their loads and stores of global memory move, by kernel.
#
# A cubin is an ELF file with a section of code for each kernel. An instruction has 128 bits, since sm_70: the lowest
# twelve say what it does, and of a load or store three say its width. So this takes no disassembler, which not every
# CUDA toolkit brings; it was compared with NVIDIA's, and found the same numbers (docs/LOG.md).


OPERATION, LOAD, STORE = 0xFFF, 0x981, 0x986  # LDG and STG
WIDTHS = (1, 1, 2, 2, 4, 8, 16, 16)  # bytes, by the three bits, of which no instruction has all
SECTIONS, OF_SECTIONS = 0x28, 0x3A  # where an ELF header has the place of section headers; their size, number and names


class Accesses(NamedTuple):
    """Loads and stores of global memory in a kernel: the number of instructions by their bytes."""

    loads: Counter[int]
    stores: Counter[int]


def accesses_of(cubin: bytes) -> dict[str, Accesses]:
    """What each kernel of a cubin has, by its mangled name."""
    by_kernel: dict[str, Accesses] = {}
    for name, code in _sections(cubin):
        if not name.startswith(".text."):
            continue
        accesses = by_kernel[name.removeprefix(".text.")] = Accesses(Counter(), Counter())
        # Opcode in bits 0 to 11, width in bits 73 to 75 of an instruction: of the high word these are bits 9 to 11.
        for low, high in struct.iter_unpack("<QQ", code):
            kind = {LOAD: accesses.loads, STORE: accesses.stores}.get(low & OPERATION)
            if kind is not None:
                kind[WIDTHS[high >> 9 & 7]] += 1
    return by_kernel


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit ELF file."""
    # ELF64: the header has where section headers begin, their size and number, and which of them has the names.
    (place,) = struct.unpack_from("<Q", elf, SECTIONS)
    size, number, of_names = struct.unpack_from("<HHH", elf, OF_SECTIONS)
    # Each header begins with the place of its name among names, and has at 24 and 32 the place and size of its content.
    headers = [struct.unpack_from("<I20xQQ", elf, place + i * size) for i in range(number)]
    names = headers[of_names][1]
    for name, begin, length in headers:
        yield elf[names + name : elf.index(b"\0", names + name)].decode(), elf[begin : begin + length]


ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "kernels"
EMULATOR = SOURCES / "emulator"

ARCHITECTURES = (80, 90, 100)  # machine code for each that nvcc knows, and PTX of the newest
OLDER = (70, 75)  # PTX of the first that nvcc knows: older GPUs make machine code of it when they first load it
# Headers of this torch or any later one make a library that this one loads, and every later one.
TARGET_TORCH = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # 2.11
VECTOR_BYTES = 16
# Kernels for rows that begin at no multiple of 16 bytes, and for sums of columns; those whose results are few numbers.
NOT_BY_VECTORS = re.compile(r"^(forward|backward)<.*, 1>$|^sum_parts<")
STORES_NO_ROW = re.compile(r"^(statistics_of_row|means_of_rows)<")
KEEP = "--keep"  # nvcc leaves the machine code of each architecture in a file of its own, too
WARNINGS = ("-Wall", "-Wextra", "-Werror")


class BuildError(RuntimeError):
    """A build that failed: the message names what is missing, or is the compiler's output."""


class Kernel(NamedTuple):
    """Resources of one kernel on one architecture, as ptxas reports them; bytes of its widest load and store."""

    name: str
    architecture: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    load_bytes: int = 0
    store_bytes: int = 0

    @property
    def is_narrow(self) -> bool:
        """Whether it is made for vectors of 16-bit elements, and stores or loads none at once."""
        # Judged by the demangled name. Of 16-bit elements a kernel without vectors would move two bytes at a time.
        if not re.search(r"<.*\b(Half|BFloat16)\b", self.name) or NOT_BY_VECTORS.search(self.name):
            return False
        stores = not STORES_NO_ROW.search(self.name)
        return self.load_bytes < VECTOR_BYTES or (stores and self.store_bytes < VECTOR_BYTES)


def build_cuda(output: Path) -> list[Kernel]:
    """Compile the shared library of all CUDA kernels to `output`; return the resources of each kernel."""
    nvcc, torch = find_nvcc(), find_torch()
    plain = [find_compiler(), *_common(), TARGET_TORCH, *WARNINGS, "-fPIC", "-fvisibility=hidden", "-c"]
    # bindings.cpp is host code: it sees torch's stable interface alone, so that the library outlives this torch.
    objects = _compile(dict.fromkeys(kernel_sources(), _cuda(ARCHITECTURES)) | {SOURCES / "bindings.cpp": plain})
    # torch_cuda is found through torch, where there is one: it may not be named, as builds for the CPU lack it.
    libraries = ["-ltorch_cpu", "-lc10", "-Xlinker", "--no-as-needed,-ltorch,--no-undefined,-z,now"]
    linker = [nvcc, "-shared", "-cudart", "static"]
    _link(linker, objects, [f"-L{torch}/lib", *libraries], output, ending=sources_hash())
    return _resources(objects)


def compile_cuda(sources: Sequence[Path], *, architectures: Sequence[int]) -> list[Kernel]:
    """Resources of the kernels in these sources, compiled for these architectures and not linked."""
    return _resources(_compile(dict.fromkeys(sources, _cuda(architectures))))


def _common() -> list[str]:
    return ["-std=c++17", "-O3", f"-I{SOURCES}", "-isystem", f"{find_torch()}/include"]


def _cuda(wanted: Sequence[int]) -> list[str]:
    """nvcc with its flags: machine code for what it knows of the wanted architectures, and PTX."""
    nvcc = find_nvcc()
    # A toolkit drops old architectures and lacks new ones: what it knows is compiled, and PTX covers the rest.
    known = _run([nvcc, "--list-gpu-code"]).split()
    architectures = [number for number in wanted if f"sm_{number}" in known]
    if not architectures:
        raise BuildError(f"{nvcc} knows none of sm_{', sm_'.join(map(str, wanted))}: a newer CUDA toolkit does")
    older = [number for number in OLDER if f"sm_{number}" in known]
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    # PTX of the oldest known for GPUs before our list, of the newest for those that come later; drivers compile it.
    targets += [f"-gencode=arch=compute_{number},code=compute_{number}" for number in (*older[:1], architectures[-1])]
    host = f"-Xcompiler={','.join(('-fPIC', '-fvisibility=hidden', *WARNINGS[:2]))}"
    return [nvcc, *_common(), *targets, host, "-Werror", "all-warnings", "-lineinfo", "-Xptxas", "-v", KEEP, "-c"]


def _resources(objects: Iterable[Path]) -> list[Kernel]:
    return [kernel for each in objects for kernel in _kernels(each.with_suffix(".log").read_text(), _widths(each))]


def build_emulated(sources: Sequence[Path] = (), *, bindings: bool = True) -> Path:
    """Compile `sources` (by default all kernels) for the CPU, under the emulator and its checker -> the library."""
    torch = find_torch()
    common = [find_compiler(), "-std=c++17", "-O1", "-g1", f"-I{SOURCES}", "-isystem", f"{torch}/include", *WARNINGS]
    common += ["-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
    # Accesses stay as they are written: the vectors of a struct are not taken apart, nor others made.
    as_written = [
        "-fno-tree-sra",
        "-fno-ipa-sra",
        "-fno-tree-vectorize",
        "--param",
        "tsan-instrument-func-entry-exit=0",
    ]
    # Compiled as C++ with the thread sanitizer's calls at each access, which the emulator's checker receives. The
    # emulator itself and the bindings are not watched.
    kernels = [*common, "-fsanitize=thread", *as_written, "-x", "c++", "-c"]
    commands = dict.fromkeys(sources or kernel_sources(), kernels)
    commands |= {path: [*common, "-c"] for path in sorted(EMULATOR.glob("*.cpp"))}
    libraries = ["-ldl"]
    if bindings:
        commands[SOURCES / "bindings.cpp"] = [*common, TARGET_TORCH, "-DMEGATRONISH_EMULATED", "-c"]
        libraries += [f"-L{torch}/lib", "-ltorch_cpu", "-lc10"]
    objects = _compile(commands)
    # Named by its inputs, so one that exists is complete and current; a test that needs it compiles nothing.
    output = _cache() / f"emulated-{_hash(str(path) for path in objects)}.so"
    if not output.exists():
        _link([find_compiler(), "-shared"], objects, [*libraries, "-Wl,--no-undefined", "-Wl,-z,now"], output)
    return output


def kernel_sources() -> list[Path]:
    """The .cu files, one for each family of operations; BuildError where there are none."""
    sources = sorted(SOURCES.glob("[!.]*.cu"))
    if not sources:
        raise BuildError(f"there are no kernels in {SOURCES}: build from a checkout of the repository")
    return sources


def sources_hash() -> str:
    """Hash of all sources of the library. The library file ends with these characters, which loaders ignore."""
    paths = sorted(path for pattern in ("*.cu", "*.cpp", "*.h") for path in SOURCES.glob(f"[!.]{pattern}"))
    return _hash(part for path in paths for part in (path.name, path.read_text(encoding="utf-8")))


def find_nvcc() -> str:
    """The path of CUDA's compiler, by CUDA_HOME or PATH; BuildError where there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    path = path or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        raise BuildError(
            "CUDA's compiler nvcc is not here, so the kernels cannot be built; install the CUDA toolkit or set "
            "CUDA_HOME. Without kernels everything runs on the references in torch"
        )
    return path


def find_compiler() -> str:
    """The path of a C++ compiler for the CPU: CXX, g++ or c++; BuildError where there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise BuildError("there is no C++ compiler here: install g++, or name one in CXX")


def find_torch() -> Path:
    """The folder of an installed torch; BuildError where there is none.

    torch need not be importable: pip hides it from an isolated build.
    """
    spec = importlib.util.find_spec("torch")
    folders = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    folders += [Path(sysconfig.get_path(name)) / "torch" for name in ("platlib", "purelib")]
    for folder in folders:
        if (folder / "include" / "torch" / "csrc" / "stable").is_dir():
            return folder
    raise BuildError("the kernels are built against torch's headers: install torch 2.11 or newer first")


def table(kernels: Iterable[Kernel]) -> str:
    """A line for each kernel: registers on each architecture, the largest shared memory and spill of any, and bytes.

    These are what the widest load and the widest store move, on the architecture where it is least.
    """
    by_name: dict[str, list[Kernel]] = {}
    for each in kernels:
        by_name.setdefault(each.name, []).append(each)
    architectures = sorted(
        {each.architecture for variants in by_name.values() for each in variants}, key=lambda name: int(name[3:])
    )
    lines = [f"registers on {', '.join(architectures)}; bytes of static shared memory, spilled, of a load, of a store"]
    # A kernel is as good as its worst architecture: the most memory, the narrowest access.
    for name, variants in sorted(by_name.items()):
        registers = {each.architecture: each.registers for each in variants}
        columns = "".join(f"{registers.get(architecture, 0):>4}" for architecture in architectures)
        most = f"{max(each.shared_bytes for each in variants):>6} {max(each.spill_bytes for each in variants):>6}"
        moved = f"{min(each.load_bytes for each in variants):>3} {min(each.store_bytes for each in variants):>3}"
        lines.append(f"{columns} {most} {moved}  {name}")
    return "\n".join(lines)


def main() -> int:
    """`make kernels`: compile all kernels, load the library, print the resources.

    Status 1 if one spills registers, or is made for vectors of 16 bytes and moves none at once.
    """
    parser = argparse.ArgumentParser(description="Compile all CUDA kernels and print their registers and spills.")
    parser.add_argument("--output", type=Path, help="the library (default: in build/kernels)")
    output = parser.parse_args().output or _cache() / "kernels_cuda.so"
    try:
        kernels = build_cuda(output)
        _run([sys.executable, "-c", f"import torch; torch.ops.load_library({str(output)!r})"])
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(kernels))
    # These two make a build fail, as both are silent at run time and slow.
    spilled = sorted({each.name for each in kernels if each.spill_bytes})
    narrow = sorted(f"{each.name} on {each.architecture}" for each in kernels if each.is_narrow)
    print(f"{output}: {len({each.name for each in kernels})} kernels, {len(spilled)} of them spill registers")
    if narrow:
        print(f"these move no {VECTOR_BYTES} bytes at once: {', '.join(narrow)}")
    return 1 if spilled or narrow or not kernels else 0  # none: ptxas says it in other words than these


def _run(command: Sequence[str]) -> str:
    """Output of the command, stdout before stderr; BuildError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _cache() -> Path:
    folder = ROOT / "build" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # the sources may belong to another
        folder = private_folder(Path(tempfile.gettempdir()) / f"megatronish-kernels-{os.getuid()}")
    return folder


def _compile(commands: dict[Path, list[str]]) -> list[Path]:
    """{source: command without its file names} -> object files, with the compiler's output in a .log next to it."""
    # All headers count for every object: a few seconds of compilation too many, and no list of dependencies that may be
    # wrong.
    headers = [path.read_text() for path in sorted(SOURCES.rglob("[!.]*.h"))]
    torch = (find_torch() / "version.py").read_text()

    def compile_one(item: tuple[Path, list[str]]) -> Path:
        source, command = item
        key = _hash([*command, _version(command[0]), torch, str(source), source.read_text(), *headers])
        output = _cache() / f"{source.stem}-{key}.o"
        if not output.exists():
            # Next to its final place and then renamed: a build that is killed, or a second one at the same time, leaves
            # no half object.
            with tempfile.TemporaryDirectory(dir=output.parent) as folder:
                fresh = Path(folder) / output.name
                kept = ["--keep-dir", folder] if KEEP in command else []
                said = _run([*command, *kept, str(source), "-o", str(fresh)])
                # The log and the machine code before the object, as the object says that all of it is there.
                output.with_suffix(".log").write_text(said)
                for cubin in Path(folder).glob("*.cubin"):  # dropout.compute_90.cubin
                    cubin.replace(_cubin_of(output, cubin.name.split("_")[-1].removesuffix(".cubin")))
                fresh.replace(output)
        return output

    # A large file that starts last would be compiled alone at the end.
    longest_first = sorted(commands.items(), key=lambda item: item[0].stat().st_size, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, longest_first))


def _link(
    linker: Sequence[str], objects: Sequence[Path], libraries: Sequence[str], output: Path, *, ending: str = ""
) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        fresh = Path(folder) / output.name
        _run([*linker, "-o", str(fresh), *map(str, objects), *libraries])
        # After the last section, where no loader looks: by it an import sees that sources have changed since.
        with fresh.open("ab") as file:
            file.write(ending.encode())
        fresh.replace(output)


def _cubin_of(output: Path, architecture: str) -> Path:
    return output.with_suffix(f".sm_{architecture}.cubin")


def _widths(output: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes of the widest load and store of each kernel in an object file, by mangled name and architecture."""
    widths = {}
    for cubin in sorted(output.parent.glob(f"{output.stem}.sm_*.cubin")):
        for name, accesses in accesses_of(cubin.read_bytes()).items():
            widths[name, cubin.stem.split(".")[-1]] = max(accesses.loads, default=0), max(accesses.stores, default=0)
    return widths


def _kernels(log: str, widths: Mapping[tuple[str, str], tuple[int, int]]) -> list[Kernel]:
    """The resources of each kernel, parsed from the output of `-Xptxas -v`."""
    # ptxas writes two lines a kernel and architecture; `.*?` takes the first numbers that follow the name.
    entry = re.compile(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        re.DOTALL,
    )
    kernels = []
    for name, architecture, stores, loads, registers, rest in entry.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        spilled = int(stores) + int(loads)
        moved = widths.get((name, architecture), (0, 0))
        kernels.append(Kernel(name, architecture, int(registers), int(shared[1]) if shared else 0, spilled, *moved))
    plain = _demangled([each.name for each in kernels])
    return [each._replace(name=name) for each, name in zip(kernels, plain, strict=True)]


def _demangled(names: Sequence[str]) -> list[str]:
    """Mangled names -> `softmax_forward<float>`; unchanged where there is no c++filt."""
    if not names or shutil.which("c++filt") is None:
        return list(names)
    lines = _run(["c++filt", *names]).splitlines()
    plain = (line.partition("(megatronish")[0] if line.count("(") > 1 else line for line in lines)
    return [re.sub(r"^void |megatronish::|\(anonymous namespace\)::|c10::", "", line) for line in plain]


if __name__ == "__main__":
    sys.exit(main())
