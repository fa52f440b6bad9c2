"""How are tensors read from files of torch.save and written to them, one at a time?

Such a file is a zip archive without compression: `data.pkl`, a pickle of everything but the bytes of tensors, and a
record `data/KEY` for the bytes of each storage; tensors are views of storages, and may share one. Reading follows the
pickle (torch_pickle.py) and fetches a tensor's bytes when they are asked for. Writing puts the pickle first, which
needs shapes alone, and then takes the tensors as they come, so nobody ever holds a file's worth of them.
"""

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megatronish.errors import UserError
from megatronish.formats.safetensors import nbytes_of
from megatronish.formats.torch_file.unpickler import STORAGES, Refused, Stored, unpickle
from megatronish.formats.weights import LazyTensor

ROOT = "archive"
ALIGNMENT = 64  # where torch begins a storage, so that a file can be mapped into memory
LOCAL_HEADER = 30
ZIP64_EXTRA = 20
PADDING = 0x4246  # the id under which torch pads a record's header
WRITTEN_AS = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}


class _ArchiveRecord(NamedTuple):
    """Where the bytes of a record lie."""

    start: int
    size: int
    crc: int  # 0 where the writer computed none


class TorchFile:
    """A file of torch.save. UserError if it is missing, damaged, or would run code.

    `content` is what was saved, with `Stored` in the place of tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._records = _records(path)
            self.content = unpickle(self._bytes("data.pkl"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}; correct the path, or fetch it again") from error
        except Refused as error:
            raise UserError(
                f"{path} is refused: {error}; nothing of it was run, fetch it from a source you trust"
            ) from error
        except UserError:
            raise
        except Exception as error:  # a damaged pickle raises whatever its damage spells
            raise self._damaged(f"its content cannot be read ({error})") from error
        if "byteorder" in self._records and self._bytes("byteorder") != b"little":
            raise UserError(f"{path} was written on a big-endian machine; save it again on a little-endian one")

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self.path} is damaged: {why}; fetch it again")

    def _record(self, name: str) -> _ArchiveRecord:
        if name not in self._records:
            raise self._damaged(f"it lacks the record {name}")
        return self._records[name]

    def _bytes(self, name: str) -> bytes:
        data = bytearray(self._record(name).size)
        self._fill(memoryview(data), name, 0)
        return bytes(data)

    def tensor(self, stored: Stored) -> LazyTensor:
        """A tensor of `content`, not read yet; UserError if the file does not hold all of it."""
        numbers = (stored.offset, *stored.shape, *stored.strides)
        sound = len(stored.shape) == len(stored.strides) and all(type(n) is int and n >= 0 for n in numbers)
        if not sound:
            raise self._damaged(f"a tensor has the shape {stored.shape} and the strides {stored.strides}")
        name, itemsize = f"data/{stored.storage.key}", stored.dtype.itemsize
        size = self._record(name).size
        end = (stored.offset + _span(stored.shape, stored.strides)) * itemsize
        if end > size:
            raise self._damaged(f"a tensor ends at byte {end} of the record {name}, which has {size}")
        return LazyTensor(tuple(stored.shape), stored.dtype, partial(self._read, name, stored))

    def _read(self, name: str, stored: Stored) -> Tensor:
        flat = torch.empty(_span(stored.shape, stored.strides), dtype=stored.dtype)
        self._fill(memory_of(flat), name, stored.offset * stored.dtype.itemsize)
        return flat.as_strided(stored.shape, stored.strides).contiguous()

    def _fill(self, memory: memoryview, name: str, offset: int) -> None:
        """Read from `offset` of a record on; a record that is read whole is checked."""
        record = self._record(name)
        try:
            with self.path.open("rb") as file:
                file.seek(record.start + offset)
                read = file.readinto(memory)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}; fetch it again") from error
        if read != memory.nbytes:
            raise self._damaged("it is cut short")
        if memory.nbytes == record.size and record.crc and zlib.crc32(memory) != record.crc:
            raise self._damaged(f"the bytes of its record {name} do not match their checksum")


def _records(path: Path) -> dict[str, _ArchiveRecord]:
    """The records of an archive by their names inside its one folder."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            raise UserError(
                f"{path} is no zip archive, as torch.save writes since torch 1.6; if it is older, load it with torch "
                "and save it again, else fetch it again"
            )
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            raise UserError(f"{path} is damaged: it is no whole zip archive ({error}); fetch it again") from error
        found: dict[str, _ArchiveRecord] = {}
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED:
                raise UserError(f"{path} is compressed, as torch.save leaves nothing; load it and save it again")
            file.seek(entry.header_offset)
            header = file.read(LOCAL_HEADER)
            if header[:4] != b"PK\3\4" or len(header) < LOCAL_HEADER:
                raise UserError(f"{path} is damaged: {entry.filename} is not where it should be; fetch it again")
            name_length, extra_length = struct.unpack("<HH", header[26:])
            start = entry.header_offset + LOCAL_HEADER + name_length + extra_length
            found[entry.filename.partition("/")[2]] = _ArchiveRecord(start, entry.file_size, entry.CRC)
    return found


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a view."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, its own if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


class TorchFileWriter:
    """Writes `content` as torch.save would, for torch.load of any kind.

    The tensors of `content` are lazy and give shapes and dtypes alone; `add` takes their values, in the same order.
    """

    def __init__(self, path: Path, content: Any) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream, protocol=2)
        pickler.dump(content)
        self._expected = pickler.tensors
        self._added = 0
        self._file = path.open("wb")
        self._archive = zipfile.ZipFile(self._file, "w", allowZip64=True)
        self._write("data.pkl", [stream.getvalue()], size=stream.tell())
        self._write("byteorder", [b"little"], size=len(b"little"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is not None:
                with suppress(OSError, ValueError):  # an archive left open complains when it is collected
                    self._archive.close()
                return
            assert self._added == len(self._expected), "tensors are missing"
            self._write("version", [b"3\n"], size=2)
            self._archive.close()

    def add(self, rows: Sequence[Tensor]) -> None:
        """The next tensor, as parts of it that follow each other."""
        expected = self._expected[self._added]
        assert all(part.dtype == expected.dtype for part in rows), "another dtype than was told"
        self._write(f"data/{self._added}", rows, size=nbytes_of(expected))
        self._added += 1

    def _write(self, name: str, parts: Sequence[Tensor] | Sequence[bytes], *, size: int) -> None:
        entry = zipfile.ZipInfo(f"{ROOT}/{name}")
        large = size > zipfile.ZIP64_LIMIT // 2
        header = LOCAL_HEADER + len(entry.filename) + (ZIP64_EXTRA if large else 0)
        gap = -(self._file.tell() + header + 4) % ALIGNMENT
        entry.extra = struct.pack("<HH", PADDING, gap) + b"Z" * gap
        with self._archive.open(entry, "w", force_zip64=large) as record:
            written = sum(record.write(data if isinstance(data, bytes) else memory_of(data)) for data in parts)
        assert written == size, "another size than was told"


class _Key(NamedTuple):
    """A storage to be written."""

    key: str
    tensor: LazyTensor


class _Pickler(pickle.Pickler):
    """Spells lazy tensors as torch spells its own; numbers their storages."""

    def __init__(self, stream: io.BytesIO, *, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.tensors: list[LazyTensor] = []

    def persistent_id(self, thing: Any) -> Any:
        if not isinstance(thing, _Key):
            return None
        return "storage", WRITTEN_AS[thing.tensor.dtype], thing.key, "cpu", thing.tensor.like().numel()

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, LazyTensor):
            return NotImplemented
        if thing.dtype not in WRITTEN_AS:
            raise UserError(f"{thing.dtype} has no storage in a file of torch.save; convert the model to bf16 first")
        key = _Key(str(len(self.tensors)), thing)
        self.tensors.append(thing)
        like = thing.like()
        return torch._utils._rebuild_tensor_v2, (key, 0, thing.shape, like.stride(), False, OrderedDict())
