"""Input files of preprocessing: which files --input names, and what each of them is by its first bytes.

A file is read as JSON lines, plain or compressed (gzip, bzip2, xz, Zstandard), as one JSON array, or as Parquet.
Other formats that are met in practice are refused by name (foreign.py), with what makes JSON lines of them.
"""

import bz2
import glob
import gzip
import importlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from megatronish.core.errors import UserError
from megatronish.data.unsupported_formats import foreign_format, text_format

PLAIN_ENDINGS = (".jsonl", ".json", ".ndjson")
PARQUET_MAGIC = b"PAR1"
HEAD_BYTES = 512
MAX_LISTED = 10
BOM = b"\xef\xbb\xbf"


class Compression(NamedTuple):
    """Compression of a file: its ending, its first bytes, and the function that opens a file without it."""

    name: str
    ending: str
    magic: bytes
    open: Callable[[BinaryIO], BinaryIO]


def _open_zstd(raw: BinaryIO) -> BinaryIO:
    try:
        library: Any = importlib.import_module("compression.zstd")
    except ImportError:
        library = optional_library("zstandard", extra="zstd", what="Zstandard files (.zst)")
        return io.BufferedReader(_ZstandardFrames(raw, library))
    return library.open(raw)


COMPRESSIONS = (
    Compression("gzip", ".gz", b"\x1f\x8b", gzip.open),  # type: ignore[arg-type]
    Compression("bzip2", ".bz2", b"BZh", bz2.open),  # type: ignore[arg-type]
    Compression("xz", ".xz", b"\xfd7zXZ\x00", lzma.open),  # type: ignore[arg-type]
    Compression("Zstandard", ".zst", b"\x28\xb5\x2f\xfd", _open_zstd),
)
SUFFIXES = {*PLAIN_ENDINGS, *(each.ending for each in COMPRESSIONS), ".parquet"}
ENDINGS = (*PLAIN_ENDINGS, *(plain + each.ending for plain in PLAIN_ENDINGS for each in COMPRESSIONS), ".parquet")


class OpenInput(NamedTuple):
    """An input file: `raw` as it is on the disk, `text` without its compression."""

    raw: BinaryIO
    text: BinaryIO


def input_files(names: Sequence[str | Path]) -> list[Path]:
    """The files that --input names: files, folders (all files in them with a known ending), patterns (`data/*.jsonl`).

    What a folder or a pattern names is sorted. UserError for a name that names no file.
    """
    if not names:
        raise UserError("--input is empty; name files, folders or patterns")
    return [path for name in names for path in _files_of(str(name))]


def _files_of(name: str) -> list[Path]:
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.name.endswith(ENDINGS) and not _is_hidden(file, path))
        if not found:
            raise UserError(f"--input {name} is a folder without any file that ends in {', '.join(ENDINGS)}; check it")
        return found
    if glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError(f"--input {name} is a pattern that no file fits; check it")
        return [file for match in matches for file in _files_of(match)]
    raise UserError(f"--input {name} is not a file; check the path")


def same_names(files: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Pairs of files that may hold the same texts: a file that is named twice, or with and without its compression."""
    seen, pairs = dict[Path, Path](), []
    for file in files:
        stem = Path(os.path.realpath(file))
        while stem.suffix in SUFFIXES:
            stem = stem.with_suffix("")
        if stem in seen:
            pairs.append((seen[stem], file))
        seen.setdefault(stem, file)
    return pairs


def listed(files: Sequence[Path]) -> str:
    """The names of the first files, and how many more there are."""
    names = ", ".join(map(str, files[:MAX_LISTED]))
    return names if len(files) <= MAX_LISTED else f"{names} and {len(files) - MAX_LISTED:,} more"


def text_format_of(path: Path) -> str | None:
    """What a file without any good line seems to be, and what to do with it; None if there is nothing to say."""
    if is_parquet(path):
        return None
    with open_input(path) as file:
        return text_format(file.text.peek(HEAD_BYTES)[:HEAD_BYTES])  # type: ignore[attr-defined]


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its first bytes."""
    with path.open("rb") as file:
        return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC


@contextmanager
def open_input(path: Path) -> Iterator[OpenInput]:
    """Open a file of JSON text. UserError if its first bytes are those of another format."""
    with path.open("rb") as raw:
        compression = _compression_of(path, raw.peek(HEAD_BYTES))
        if compression is None:
            _refuse_foreign(path, str(path), raw.peek(HEAD_BYTES))
            yield OpenInput(raw, raw)
            return
        with compression.open(raw) as text:
            head = text.peek(HEAD_BYTES)  # type: ignore[attr-defined]
            inner = f"{path} (without its {compression.name} compression)"
            if head.startswith(PARQUET_MAGIC) or any(head.startswith(each.magic) for each in COMPRESSIONS):
                raise UserError(f"--input {inner} is not text, but another packed format; unpack {path} first")
            _refuse_foreign(path, inner, head)
            yield OpenInput(raw, text)


def _compression_of(path: Path, head: bytes) -> Compression | None:
    """By the first bytes. UserError for a file whose name alone says that it is compressed."""
    if head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F:  # a skippable frame, which pzstd puts first
        return COMPRESSIONS[-1]
    by_magic = (each for each in COMPRESSIONS if head.startswith(each.magic))
    by_name = (each for each in COMPRESSIONS if path.name.endswith(each.ending) and head)
    found, named = next(by_magic, None), next(by_name, None)
    if found is None and named is not None:
        raise UserError(
            f"--input {path} ends in {named.ending}, but does not begin as {named.name} does; rename it if it is not "
            "compressed, else copy it again"
        )
    return found


def _refuse_foreign(path: Path, named: str, head: bytes) -> None:
    what = foreign_format(path, head)
    if what is not None:
        raise UserError(f"--input {named} is {what}")


@contextmanager
def unpacking(path: Path, where: Callable[[], str]) -> Iterator[None]:
    """UserError with the place, `where`, in place of what the libraries raise for a file that is broken."""
    try:
        yield
    except EOFError as error:
        raise UserError(f"--input {path} is cut off {where()} ({error}); copy it again") from error
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, where(), error) from error
    except OSError as error:
        if error.errno is not None:  # else bz2 says so that the data are invalid
            raise
        raise _damaged(path, where(), error) from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # the class is in a library that may be missing
            raise
        raise _damaged(path, where(), error) from error


def _damaged(path: Path, where: str, error: Exception) -> UserError:
    return UserError(f"--input {path} is damaged {where}: it cannot be unpacked ({error}); copy it again")


def optional_library(name: str, *, extra: str, what: str) -> ModuleType:
    """A library that only some inputs need. UserError with the command that installs it if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(
            f"{what} are read by {package}, which is not installed; pip install {package} (or megatronish[{extra}])"
        ) from error


class _ZstandardFrames(io.RawIOBase):
    """Bytes of a Zstandard file, frame after frame. EOFError if the last frame is cut off.

    The library's own reader takes the end of a truncated file for the end of the data.
    """

    def __init__(self, raw: BinaryIO, library: Any) -> None:
        self._raw = raw
        self._library = library
        self._rest = b""  # decompressed, and not yet read
        self._packed = b""  # of the next frame
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            packed = self._packed or self._raw.read(1 << 17)
            self._packed = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame is None:
                decompressor = self._library.ZstdDecompressor(max_window_size=1 << 31)
                self._frame = decompressor.decompressobj()
            self._rest = self._frame.decompress(packed)
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
