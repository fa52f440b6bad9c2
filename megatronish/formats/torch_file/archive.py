"""Reader and writer of torch.save's files, one tensor in memory at a time.

Such a file is a zip archive without compression. Its record `data.pkl` is a pickle of everything but the elements of
tensors, and a record `data/KEY` has the bytes of each storage; tensors are strided views of storages and may share one.
`TorchFile` reads the pickle without running code (unpickler.py), and a tensor's bytes when the tensor is used.
`TorchFileWriter` writes the pickle first, which needs only shapes and dtypes, and then takes one tensor after another,
so neither of them has a whole file in memory.
"""

import errno
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
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.formats.safetensors import nbytes_of
from megatronish.formats.torch_file.unpickler import STORAGES, Refused, Stored, unpickle
from megatronish.formats.weights import LazyTensor

ROOT = "archive"
ALIGNMENT = 64  # of the first byte of a storage, so that a file can be mapped into memory
MOST_DIMS = 64
LOCAL_HEADER = 30  # bytes of a record's header before its name
ZIP64_EXTRA = 20  # bytes that zipfile adds to the header of a large record
PADDING = 0x4246  # the id under which torch pads a record's header
WRITTEN_AS = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}


class _ArchiveRecord(NamedTuple):
    """Location of a record: the offset of its first byte, its number of bytes, and its CRC-32."""

    start: int
    size: int
    crc: int  # 0 where the writer computed none


class _FileSpan(io.RawIOBase):
    """Bytes [start, start + size) of a file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "a position before the first byte")
        self._at = base + offset
        return self._at

    def readinto(self, memory: Any) -> int:
        self._file.seek(self._start + self._at)
        length = max(0, min(len(memory), self._size - self._at))
        data = self._file.read(length)
        memory[: len(data)] = data
        self._at += len(data)
        return len(data)


class TorchFile:
    """Reader of a file of torch.save. UserError if it is missing, damaged, or would run code.

    `content` is the saved object, with `Stored` in the place of tensors. With a `span`, (first byte, number of bytes),
    the file is that part of a larger one.
    """

    def __init__(self, path: Path, span: tuple[int, int] | None = None) -> None:
        self.path = path
        try:
            self._records = _records(path, span)
            self.content = unpickle(self._bytes("data.pkl"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}; correct the path, or fetch it again") from error
        except Refused as error:
            raise UserError(
                f"{path} is refused: {error}; nothing of it was run, fetch it from a source you trust"
            ) from error
        except UserError:
            raise
        except Exception as error:  # a damaged pickle may raise an error of any class
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
        """Lazy tensor for a `Stored` of `content`; UserError if the file does not have all of its bytes."""
        # The pickle may hold anything here: only whole numbers that are not negative, one stride for each dim.
        # What it holds is not written into the sentence, as a tuple of tuples may be endless to write.
        shape, strides = stored.shape, stored.strides
        if not (isinstance(shape, tuple | list) and isinstance(strides, tuple | list) and len(shape) == len(strides)):
            raise self._damaged("a tensor has no shape, or not a stride for each dimension of it")
        if len(shape) > MOST_DIMS or not all(
            type(n) is int and 0 <= n < 2**63 for n in (stored.offset, *shape, *strides)
        ):
            raise self._damaged("the shape of a tensor, its strides or its offset are no whole numbers")
        # The last element of the view must be inside the storage, which is the record `name`.
        name, itemsize = f"data/{stored.storage.key}", stored.dtype.itemsize
        size = self._record(name).size
        end = (stored.offset + _span(stored.shape, stored.strides)) * itemsize
        if end > size:
            raise self._damaged(f"a tensor ends at byte {end} of the record {name}, which has {size}")
        return LazyTensor(tuple(stored.shape), stored.dtype, partial(self._read, name, stored))

    def _read(self, name: str, stored: Stored) -> Tensor:
        # Only the bytes from the first to the last element of the view are read, [span] elements; a view with gaps is
        # then copied without them, so that the result owns [*shape] elements and nothing more.
        flat = torch.empty(_span(stored.shape, stored.strides), dtype=stored.dtype)
        self._fill(memory_of(flat), name, stored.offset * stored.dtype.itemsize)
        return flat.as_strided(stored.shape, stored.strides).contiguous()

    def _fill(self, memory: memoryview, name: str, offset: int) -> None:
        """Fill `memory` from byte `offset` of a record on; the checksum of a record that is read whole is verified."""
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


def _records(path: Path, span: tuple[int, int] | None) -> dict[str, _ArchiveRecord]:
    """Records of an archive by their names inside its one folder; UserError if it is damaged or compressed."""
    first = 0 if span is None else span[0]
    with path.open("rb") as whole, whole if span is None else _FileSpan(whole, *span) as file:
        if file.read(2) != b"PK":
            raise UserError(
                f"{path} is no zip archive, as torch.save writes since torch 1.6; if it is older, load it with torch "
                "and save it again, else fetch it again"
            )
        # The central directory, at the end of the file: names, sizes and CRCs of the records.
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            raise UserError(f"{path} is damaged: it is no whole zip archive ({error}); fetch it again") from error
        # The local header of each record: its bytes begin after the header, whose name and padding differ in length.
        records: dict[str, _ArchiveRecord] = {}
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED:
                raise UserError(f"{path} is compressed, as torch.save leaves nothing; load it and save it again")
            file.seek(entry.header_offset)
            header = file.read(LOCAL_HEADER)
            if header[:4] != b"PK\3\4" or len(header) < LOCAL_HEADER:
                raise UserError(f"{path} is damaged: {entry.filename} is not where it should be; fetch it again")
            name_length, extra_length = struct.unpack("<HH", header[26:])
            start = first + entry.header_offset + LOCAL_HEADER + name_length + extra_length
            records[entry.filename.partition("/")[2]] = _ArchiveRecord(start, entry.file_size, entry.CRC)
    return records


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements of a storage from the first to the last one of a view."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def memory_of(tensor: Tensor) -> memoryview:
    """Bytes of a tensor: its own memory if it is contiguous and on the CPU, else a copy's."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


class TorchFileWriter:
    """Writer of a file that torch.load reads, also with weights_only.

    The tensors in `content` are lazy and only their shapes and dtypes are used; `add` takes their elements, in the
    order in which the pickle names them.
    """

    def __init__(self, path: Path, content: Any) -> None:
        # data.pkl: the pickler replaces each lazy tensor by a view of a storage of its own, and keeps their order.
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
                with suppress(OSError, ValueError):  # an archive that is left open raises in its finalizer
                    self._archive.close()
                return
            assert self._added == len(self._expected), "tensors are missing"
            self._write("version", [b"3\n"], size=2)
            self._archive.close()

    def add(self, rows: Sequence[Tensor]) -> None:
        """Write the next tensor, given as parts of its dim 0 in order; together they have its shape."""
        expected = self._expected[self._added]
        assert all(part.dtype == expected.dtype for part in rows), "another dtype than the lazy tensor's"
        self._write(f"data/{self._added}", rows, size=nbytes_of(expected))
        self._added += 1

    def fill(self) -> None:
        """Write all tensors that are not yet there, each read from its lazy one."""
        for tensor in self._expected[self._added :]:
            self.add([tensor.read()])

    def _write(self, name: str, parts: Sequence[Tensor] | Sequence[bytes], *, size: int) -> None:
        entry = zipfile.ZipInfo(f"{ROOT}/{name}")
        large = size > zipfile.ZIP64_LIMIT // 2
        header = LOCAL_HEADER + len(entry.filename) + (ZIP64_EXTRA if large else 0)
        # Padding in an extra field of the header moves the first byte of the record to a multiple of 64, as in torch.
        gap = -(self._file.tell() + header + 4) % ALIGNMENT
        entry.extra = struct.pack("<HH", PADDING, gap) + b"Z" * gap
        with self._archive.open(entry, "w", force_zip64=large) as record:
            written = sum(record.write(data if isinstance(data, bytes) else memory_of(data)) for data in parts)
        assert written == size, "another size than the lazy tensor's"


class _StorageKey(NamedTuple):
    """Storage to be written: the key of its record, and its tensor."""

    key: str
    tensor: LazyTensor


class _Pickler(pickle.Pickler):
    """Pickler that writes lazy tensors in the way of torch's tensors, each with a storage of its own."""

    def __init__(self, stream: io.BytesIO, *, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.tensors: list[LazyTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _StorageKey):
            return None
        return "storage", WRITTEN_AS[obj.tensor.dtype], obj.key, "cpu", obj.tensor.like().numel()

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, LazyTensor):
            return NotImplemented
        if obj.dtype not in WRITTEN_AS:
            raise UserError(f"{obj.dtype} has no storage in a file of torch.save; convert the model to bf16 first")
        key = _StorageKey(str(len(self.tensors)), obj)
        self.tensors.append(obj)
        like = obj.like()
        return torch._utils._rebuild_tensor_v2, (key, 0, obj.shape, like.stride(), False, OrderedDict())
