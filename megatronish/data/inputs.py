"""Input files of preprocessing: which files --input names, and what each of them is by its first bytes.

A file is read as JSON lines, plain or compressed (gzip, bzip2, xz, Zstandard), as one JSON array, or as Parquet.
Other formats that are met in practice are refused by name (foreign.py), with what makes JSON lines of them.
"""

import bz2
import glob
import gzip
import importlib
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from megatronish.core.errors import UserError
from megatronish.core.files import ordinary
from megatronish.core.remote import Location, RemotePath, is_url
from megatronish.data.stores import objects_of, open_binary

# Formats that preprocessing does not read: known by the first bytes of a file, with what makes JSON lines of them.


_UTF16 = "UTF-16 text; turn it into UTF-8: iconv -f UTF-16 -t UTF-8"
FOREIGN = (
    (0, b"PK\x03\x04", "a zip archive; unpack it and name the files in it"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it and name the files in it"),
    (257, b"ustar", "a tar archive; unpack it and name the files in it"),
    (0, b"\x04\x22\x4d\x18", "compressed by lz4; unpack it (lz4 -d) or compress it by gzip or zstd"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5; write its texts as JSON lines, for example with h5py and json"),
    (0, b"ARROW1", "an Arrow file; write it as Parquet with pyarrow, or as JSON lines"),
    (0, b"\xff\xff\xff\xff", "an Arrow stream, as the data sets of Hugging Face are cached; use Dataset.to_parquet"),
    (0, b"FEA1", "a Feather file; write it as Parquet with pyarrow, or as JSON lines"),
    (0, b"ORC", "ORC; write it as Parquet with pyarrow"),
    (0, b"Obj\x01", "Avro; write its texts as JSON lines"),
    (0, b"SQLite format 3", "a SQLite database; write its texts as JSON lines"),
    (0, b"\x93NUMPY", "a numpy array; write its texts as JSON lines"),
    (0, b"\x80\x04\x95", "a pickle of Python; write its texts as JSON lines"),
    (0, b"\x80\x05\x95", "a pickle of Python; write its texts as JSON lines"),
    (0, b"\x89PNG", "a picture; name files of text"),
    (0, b"\xff\xd8\xff", "a picture; name files of text"),
    (0, b"%PDF", "a PDF document; extract its text and write it as JSON lines"),
    (0, b"MMIDIDX", "an index that is tokenized already; give its prefix to pretrain_gpt.py --data-path"),
    (0, b"\xff\xfe", _UTF16),
    (0, b"\xfe\xff", _UTF16),
)
_MARKUP = "XML or HTML; extract its text and write it as JSON lines"
_TABLE = "a table of {}; write each row as a JSON object on a line, for example with csv.DictReader and json of Python"
OTHER_FORMATS = {".csv": _TABLE.format("CSV"), ".tsv": _TABLE.format("TSV"), ".xml": _MARKUP, ".html": _MARKUP}


def foreign_format(path: Location, head: bytes) -> str | None:
    """What a file is that begins with `head`, and what to do with it; None if it may be JSON."""
    for offset, magic, what in FOREIGN:
        if head[offset : offset + len(magic)] == magic:
            return what
    if head[1:2] == b"\0" and head[3:4] == b"\0":
        return _UTF16.replace("16", "16LE")
    if head[0:1] == b"\0" and head[2:3] == b"\0" and head[1:2] in (b"{", b"["):
        return _UTF16.replace("16", "16BE")
    start = head.lstrip()
    if start[:5].lower() in (b"<?xml", b"<!doc", b"<html"):
        return _MARKUP
    ending = next((suffix for suffix in PurePosixPath(path.name).suffixes if suffix in OTHER_FORMATS), None)
    return OTHER_FORMATS[ending] if ending is not None and start[:1] not in b"{[" else None


def text_format(head: bytes) -> str | None:
    """What a file without any good line seems to be, by its first bytes, and what to do with it; None if JSON lines."""
    start = head.lstrip()
    line = start.partition(b"\n")[0].decode("utf-8", "replace").strip()
    if not start or (line.startswith("{") and _is_json(line)):
        return None
    if b"\0" in head or line.count("\ufffd") > len(line) // 10:
        return "binary data, and no text"
    if line.startswith("{"):
        return "JSON objects that go over several lines; write one object a line, as jq -c . does"
    if line.startswith(('"', "[")):
        return 'JSON without keys; write each text as a line {"text": "..."}'
    return 'plain text; write each document as a line {"text": "..."}'


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


PLAIN_ENDINGS = (".jsonl", ".json", ".ndjson")
PARQUET_MAGIC = b"PAR1"
HEAD_BYTES = 512
PACKED_BYTES = 1 << 11  # of Zstandard, unpacked at a time: a block of 4 bytes may become 128 KiB
MAX_LISTED = 10
BOM = b"\xef\xbb\xbf"
ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*[{\]]")
"""Beginning of a file that is one JSON array."""


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


def input_files(names: Sequence[str | Location]) -> list[Location]:
    """The files that --input names: files, folders (all files in them with a known ending), patterns (`data/*.jsonl`).

    URLs of object storage (`s3://bucket/data/*.jsonl`) name objects, folders and patterns, too.

    What a folder or a pattern names is sorted. UserError for a name that names no file.
    """
    if not names:
        raise UserError("--input is empty; name files, folders or patterns")
    return [path for name in names for path in _files_of(str(name))]


def _files_of(name: str) -> Sequence[Location]:
    if is_url(name):
        return objects_of(name, ENDINGS)
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(_files_below(path))
        if not files:
            raise UserError(f"--input {name} is a folder without any file that ends in {', '.join(ENDINGS)}; check it")
        return files
    if glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError(f"--input {name} is a pattern that no file fits; check it")
        return [file for match in matches for file in _files_of(match)]
    raise UserError(f"--input {name} is not a file; check the path")


def _files_below(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Files of a folder with a known ending, of all folders in it, too, and of those that links in it lead to; no
    hidden ones.

    UserError for a pipe or a device, whose reader would wait for ever. A link to a folder above it is left out.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        for path in folder.iterdir():
            if path.name.startswith("."):
                continue
            if path.is_dir():  # some programs name a folder of parts x.jsonl
                yield from _files_below(path, (*above, real))
            elif path.name.endswith(ENDINGS):
                yield ordinary(path) if path.exists() else path
    except OSError as error:
        what = error.filename or folder
        raise UserError(f"--input {what} cannot be read: {error.strerror}; check the path") from error


def same_names(files: Sequence[Location]) -> list[tuple[Location, Location]]:
    """Pairs of files that may hold the same texts: a file that is named twice, or with and without its compression."""
    seen, pairs = dict[PurePosixPath, Location](), []
    for file in files:
        stem = PurePosixPath(file.url if isinstance(file, RemotePath) else os.path.realpath(file))
        while stem.suffix in SUFFIXES:
            stem = stem.with_suffix("")
        if stem in seen:
            pairs.append((seen[stem], file))
        seen.setdefault(stem, file)
    return pairs


def listed(files: Sequence[Location]) -> str:
    """The names of the first files, and how many more there are."""
    names = ", ".join(map(str, files[:MAX_LISTED]))
    return names if len(files) <= MAX_LISTED else f"{names} and {len(files) - MAX_LISTED:,} more"


def text_format_of(path: Location) -> str | None:
    """What a file without any good line seems to be, and what to do with it; None if there is nothing to say."""
    if is_parquet(path):
        return None
    with open_input(path) as file:
        return text_format(file.text.peek(HEAD_BYTES)[:HEAD_BYTES])  # type: ignore[attr-defined]


def is_parquet(path: Location) -> bool:
    """Whether a file is Parquet, by its first bytes."""
    with open_binary(path) as file:
        return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC


@contextmanager
def open_input(path: Location) -> Iterator[OpenInput]:
    """Open a file of JSON text. UserError if its first bytes are those of another format."""
    with open_binary(path) as raw:
        head = raw.peek(HEAD_BYTES)  # type: ignore[attr-defined]
        compression = _compression_of(path, head)
        if compression is None:
            _refuse_foreign(path, str(path), head)
            yield OpenInput(raw, raw)
            return
        with compression.open(raw) as text:
            head = text.peek(HEAD_BYTES)  # type: ignore[attr-defined]
            inner = f"{path} (without its {compression.name} compression)"
            if head.startswith(PARQUET_MAGIC) or any(head.startswith(each.magic) for each in COMPRESSIONS):
                raise UserError(f"--input {inner} is not text, but another packed format; unpack {path} first")
            _refuse_foreign(path, inner, head)
            yield OpenInput(raw, text)


def _compression_of(path: Location, head: bytes) -> Compression | None:
    """By the first bytes. UserError for a file whose name alone says that it is compressed."""
    if head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F:  # a skippable frame, which pzstd puts first
        return COMPRESSIONS[-1]
    by_magic = (each for each in COMPRESSIONS if head.startswith(each.magic))
    by_name = (each for each in COMPRESSIONS if path.name.endswith(each.ending) and head)
    compression, named = next(by_magic, None), next(by_name, None)
    if compression is None and named is not None:
        raise UserError(
            f"--input {path} ends in {named.ending}, but does not begin as {named.name} does; rename it if it is not "
            "compressed, else copy it again"
        )
    return compression


def _refuse_foreign(path: Location, named: str, head: bytes) -> None:
    what = foreign_format(path, head)
    if what is not None:
        raise UserError(f"--input {named} is {what}")


@contextmanager
def unpacking(path: Location, where: Callable[[], str]) -> Iterator[None]:
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


def _damaged(path: Location, where: str, error: Exception) -> UserError:
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
        self._rest = memoryview(b"")  # decompressed, and not yet read
        self._packed = b""  # of the next frame
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            packed = self._packed or self._raw.read(PACKED_BYTES)
            self._packed = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame is None:
                decompressor = self._library.ZstdDecompressor(max_window_size=1 << 31)
                self._frame = decompressor.decompressobj()
            self._rest = memoryview(self._frame.decompress(packed))
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
