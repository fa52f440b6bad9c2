"""Input files of preprocessing: which files --input names, and what each of them is by its first bytes.

A file is read as JSON lines, plain or compressed (gzip, bzip2, xz, Zstandard), as one JSON array, or as Parquet.
Other formats that are met in practice are refused by name, with what makes JSON lines of them.
"""

import bz2
import glob
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from megatronish.errors import UserError

PLAIN_ENDINGS = (".jsonl", ".json", ".ndjson")
PARQUET_MAGIC = b"PAR1"
HEAD_BYTES = 512
BOM = b"\xef\xbb\xbf"

_UTF16 = "UTF-16 text; turn it into UTF-8: iconv -f UTF-16 -t UTF-8"
FOREIGN = (
    (0, b"PK\x03\x04", "a zip archive; unpack it and name the files in it"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it and name the files in it"),
    (257, b"ustar", "a tar archive; unpack it and name the files in it"),
    (0, b"\x04\x22\x4d\x18", "compressed by lz4; unpack it (lz4 -d) or compress it by gzip or zstd"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5; write its texts as JSON lines, for example with h5py and json"),
    (0, b"ARROW1", "an Arrow file; write it as Parquet with pyarrow, or as JSON lines"),
    (0, b"\xff\xff\xff\xff", "an Arrow stream, as the data sets of Hugging Face are cached; use Dataset.to_parquet"),
    (0, b"ORC", "ORC; write it as Parquet with pyarrow"),
    (0, b"Obj\x01", "Avro; write its texts as JSON lines"),
    (0, b"SQLite format 3", "a SQLite database; write its texts as JSON lines"),
    (0, b"\x93NUMPY", "a numpy array; write its texts as JSON lines"),
    (0, b"%PDF", "a PDF document; extract its text and write it as JSON lines"),
    (0, b"MMIDIDX", "an index that is tokenized already; give its prefix to pretrain_gpt.py --data-path"),
    (0, b"\xff\xfe", _UTF16),
    (0, b"\xfe\xff", _UTF16),
)


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
ENDINGS = (*PLAIN_ENDINGS, *(plain + each.ending for plain in PLAIN_ENDINGS for each in COMPRESSIONS), ".parquet")


class OpenInput(NamedTuple):
    """An input file: `raw` as it is on the disk, `text` without its compression."""

    raw: BinaryIO
    text: BinaryIO


def input_files(names: Sequence[str | Path]) -> list[Path]:
    """The files that --input names: files, folders (all files in them with a known ending), patterns (`data/*.jsonl`).

    What a folder or a pattern names is sorted. UserError for a name that names no file.
    """
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
            _refuse_foreign(path, raw.peek(HEAD_BYTES))
            yield OpenInput(raw, raw)
            return
        with compression.open(raw) as text:
            head = text.peek(HEAD_BYTES)  # type: ignore[attr-defined]
            inner = f"{path} (without its {compression.name} compression)"
            if head.startswith(PARQUET_MAGIC) or any(head.startswith(each.magic) for each in COMPRESSIONS):
                raise UserError(f"--input {inner} is not text, but another packed format; unpack {path} first")
            _refuse_foreign(inner, head)
            yield OpenInput(raw, text)


def _compression_of(path: Path, head: bytes) -> Compression | None:
    """By the first bytes; a file whose name alone says so is opened in the same way, and then found to be broken."""
    if head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F:  # a skippable frame, which pzstd puts first
        return COMPRESSIONS[-1]
    by_magic = (each for each in COMPRESSIONS if head.startswith(each.magic))
    by_name = (each for each in COMPRESSIONS if path.name.endswith(each.ending) and head)
    return next(by_magic, None) or next(by_name, None)


def _refuse_foreign(path: str | Path, head: bytes) -> None:
    for offset, magic, what in FOREIGN:
        if head[offset : offset + len(magic)] == magic:
            raise UserError(f"--input {path} is {what}")
    if head[1:2] == b"\0" and head[3:4] == b"\0":
        raise UserError(f"--input {path} is {_UTF16.replace('16', '16LE')}")
    if head[0:1] == b"\0" and head[2:3] == b"\0" and head[1:2] in (b"{", b"["):
        raise UserError(f"--input {path} is {_UTF16.replace('16', '16BE')}")


@contextmanager
def unpacking(path: Path, where: Callable[[], str]) -> Iterator[None]:
    """UserError with the place, `where`, in place of what the libraries raise for a file that is broken."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"--input {path} cannot be unpacked after {where()}: {error}; copy it again") from error
    except OSError as error:
        if error.errno is not None:  # else bz2 says so that the data are invalid
            raise
        raise UserError(f"--input {path} cannot be unpacked after {where()}: {error}; copy it again") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # the class is in a library that may be missing
            raise
        raise UserError(f"--input {path} cannot be unpacked after {where()}: {error}; copy it again") from error


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
