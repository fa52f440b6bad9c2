"""Disk memory: tensors in a file of a local disk, read ahead of their use and written behind it (--offload-folder).

ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857) keeps on NVMe what ZeRO-Offload keeps in the CPU's memory.
Here such a tensor is an ordinary one whose memory is a shared mapping of a file: whoever reads or writes it needs to
know nothing, and the system brings pages as they are touched. Page by page that is slow, and what was touched stays
until memory is short. So who goes through many tensors does it in chunks, by `streamed`: one thread brings the next
chunk meanwhile, another writes the one before to the disk and takes it out of memory.

The file has no name: a run that is killed leaves nothing behind. Its blocks are allocated when a tensor is made: a disk
that is full says so then, and no write into a mapping ends a rank with SIGBUS later.
"""

import ctypes
import errno
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from megatronish.core.errors import RunError
from megatronish.core.files import remedy_of_writing
from megatronish.parallel.pinned import Form

CHUNK = 2**20
"""Elements of a parameter that are brought into memory together. A multiple of 1,024: whole pages of fp32."""
DEPTH = 1
"""Chunks that are read ahead of the one that is computed with."""

_LIBC = ctypes.CDLL(None, use_errno=True)  # whose calls let other threads of Python run meanwhile
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of <linux/mman.h>, since Linux 5.14
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER


class _Region(mmap.mmap):
    """Mapping of a part of a file, which lives as long as the tensors in it."""

    file: "DiskFile"
    start: int
    """Of the part in the file, in bytes."""
    address: int


# By the address of the storage of the tensors in it: a view of a tensor, and a parameter made of it, have the same.
_REGIONS: WeakValueDictionary[int, _Region] = WeakValueDictionary()


def _region_of(tensor: Tensor) -> _Region | None:
    return _REGIONS.get(tensor.untyped_storage().data_ptr()) if _REGIONS and tensor.device.type == "cpu" else None


def disk_of(tensor: Tensor) -> "DiskFile | None":
    """The file that the tensor lies in; None for one in memory."""
    region = _region_of(tensor)
    return None if region is None else region.file


class DiskFile:
    """File without a name in a folder, which grows by the tensors that are made in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.regions: WeakSet[_Region] = WeakSet()
        self._size = 0
        try:
            self.descriptor = _nameless(folder)
        except OSError as error:
            raise self.failed(error) from error

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def zeros(self, forms: Sequence[Form]) -> list[Tensor]:
        """A tensor of zeros for each form, each from the start of a page on. RunError if the disk is full."""
        begins, size = list[int](), 0
        for form in forms:
            begins.append(size)
            size += -(-form.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if not size:
            return [torch.zeros(form.shape, dtype=form.dtype) for form in forms]
        block = torch.frombuffer(self._grown_by(size), dtype=torch.uint8)
        return [
            block[begin : begin + form.num_bytes].view(form.dtype).view(form.shape)
            for form, begin in zip(forms, begins, strict=True)
        ]

    def _grown_by(self, size: int) -> _Region:
        try:
            os.posix_fallocate(self.descriptor, self._size, size)
            region = _Region(self.descriptor, size, mmap.MAP_SHARED, offset=self._size)
        except OSError as error:
            raise self.failed(error) from error
        region.file, region.start = self, self._size
        region.address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self._size += size
        self.regions.add(region)
        _REGIONS[region.address] = region
        return region

    def release(self) -> None:
        """Write what is in memory of the whole file, and take it out."""
        for region in list(self.regions):
            _drop([_Span(region, 0, len(region))])

    def failed(self, error: OSError) -> RunError:
        """What a rank says when the disk fails."""
        return RunError(
            f"a file in --offload-folder {self.folder} could not be written: {error.strerror or error}; "
            f"{remedy_of_writing(error, self.folder)} or name another folder"
        )


def _nameless(folder: Path) -> int:
    """Descriptor of a new file that no name leads to."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(prefix=".megatronish-", dir=folder)  # a file system without such files
    os.unlink(name)
    return descriptor


def zeros_beside(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Zeros in the shapes of these tensors, where they are: on their devices, or in their files."""
    disks = [disk_of(each) for each in tensors]
    made: dict[int, Tensor] = {}
    for disk in dict.fromkeys(disk for disk in disks if disk is not None):
        numbers = [number for number, other in enumerate(disks) if other is disk]
        forms = [Form(tuple(tensors[number].shape), tensors[number].dtype) for number in numbers]
        made |= dict(zip(numbers, disk.zeros(forms), strict=True))
    return [
        made[number] if number in made else torch.zeros_like(each, requires_grad=False)
        for number, each in enumerate(tensors)
    ]


# Streaming. Chunk i is computed with while chunk i + 1 is read and chunk i - 1 is written: with DEPTH chunks ahead,
# DEPTH + 2 are in memory, because one is read only when the chunk whose place it takes has left.


class _Span(NamedTuple):
    """Whole pages of a mapping: bytes from its start."""

    region: _Region
    begin: int
    end: int


def _span_of(tensor: Tensor) -> _Span | None:
    region = _region_of(tensor)
    if region is None or not tensor.numel():
        return None
    begin = tensor.data_ptr() - region.address
    end, page = begin + tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    return _Span(region, begin // page * page, -(-end // page) * page)


def streamed(chunks: Sequence[Sequence[Tensor]], *, writes: bool) -> Iterator[int]:
    """The number of each chunk in turn, while its tensors are in memory; what is in memory anyway costs nothing.

    Tensors are contiguous. What `writes` is written to the disk once the next number is asked for. RunError if the disk
    fails.
    """
    spans = [[span for tensor in chunk if (span := _span_of(tensor)) is not None] for chunk in chunks]
    disks = {span.region.file for chunk in spans for span in chunk}
    if not disks:
        yield from range(len(chunks))
        return
    try:
        for disk in disks:  # what others have touched since the last time
            disk.release()
        yield from _streamed(spans, writes=writes, depth=DEPTH)
    except OSError as error:
        raise next(iter(disks)).failed(error) from error


def _streamed(spans: Sequence[Sequence[_Span]], *, writes: bool, depth: int) -> Iterator[int]:
    ahead, behind = deque[Future[None]](), list[Future[None]]()
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        started = 0
        for number in range(len(spans)):
            while started < min(number + depth + 1, len(spans)):
                before = behind[started - depth - 2] if started >= depth + 2 else None
                ahead.append(reader.submit(_bring, spans[started], before, writes=writes))
                started += 1
            ahead.popleft().result()
            yield number
            behind.append(writer.submit(_drop, spans[number], writes=writes))
        for each in behind:
            each.result()


def _bring(spans: Iterable[_Span], before: Future[None] | None, *, writes: bool) -> None:
    """Returns once the pages are mapped, for writing if asked for; not before the pages of `before` have left."""
    if before is not None:
        before.result()
    spans = list(spans)
    for region, begin, end in spans:  # all requests to the disk at once, before one is waited for
        os.posix_fadvise(region.file.descriptor, region.start + begin, end - begin, os.POSIX_FADV_WILLNEED)
    for region, begin, end in spans:
        _advise(region, begin, end, _POPULATE_WRITE if writes else _POPULATE_READ)


def _drop(spans: Iterable[_Span], *, writes: bool = True) -> None:
    """Unmap the pages, write what is new of them, and give their memory back, in this order: mapped pages stay."""
    spans = list(spans)
    for region, begin, end in spans:
        _advise(region, begin, end, mmap.MADV_DONTNEED)
        if writes:
            start, size = ctypes.c_int64(region.start + begin), ctypes.c_int64(end - begin)
            _call(_LIBC.sync_file_range, region.file.descriptor, start, size, _WRITE_AND_WAIT)
    for region, begin, end in spans:
        os.posix_fadvise(region.file.descriptor, region.start + begin, end - begin, os.POSIX_FADV_DONTNEED)


def _advise(region: _Region, begin: int, end: int, advice: int) -> None:
    _call(_LIBC.madvise, ctypes.c_void_p(region.address + begin), ctypes.c_size_t(end - begin), advice)


def _call(function: "ctypes._NamedFuncPointer", *arguments: object) -> None:
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def release(*tensors: Tensor) -> None:
    """Write what is in memory of these tensors to their disk and take it out; nothing for those in memory."""
    _drop([span for tensor in tensors if (span := _span_of(tensor)) is not None])


class ChunkPart(NamedTuple):
    """Elements `begin` to `end` of the tensor of this number among several."""

    number: int
    begin: int
    end: int


def chunks_of(sizes: Sequence[int]) -> list[list[ChunkPart]]:
    """Tensors of these sizes in chunks of at most CHUNK elements: large ones are cut, small ones share a chunk.

    Every cut lies at a multiple of CHUNK from the start of a tensor: torch's fused optimizers compute 8 or 16 elements
    at once and the last ones one by one, which rounds otherwise, so a cut elsewhere would change bits.
    """
    chunks, room = list[list[ChunkPart]](), 0
    for number, size in enumerate(sizes):
        for begin in range(0, size, CHUNK):
            part = ChunkPart(number, begin, min(begin + CHUNK, size))
            if part.end - begin > room:
                chunks.append([])
                room = CHUNK
            chunks[-1].append(part)
            room -= part.end - begin
    return chunks


def pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor, flat, piece by piece, each while it is in memory; a tensor in memory as a whole."""
    flat = tensor.view(-1)
    if disk_of(tensor) is None:
        yield flat
        return
    pieces = [flat[part.begin : part.end] for (part,) in chunks_of([flat.numel()])]
    for number in streamed([[piece] for piece in pieces], writes=False):
        yield pieces[number]


def in_chunks(
    groups: Sequence[Sequence[Tensor]], *, writes: bool
) -> Iterator[list[tuple[ChunkPart, tuple[Tensor, ...]]]]:
    """Parts of groups of tensors of one size, flat, chunk by chunk; groups in memory are a chunk as they are."""
    flat = [tuple(tensor.detach().view(-1) for tensor in group) for group in groups]
    sizes = [group[0].numel() for group in flat]
    if all(disk_of(tensor) is None for tensor in chain.from_iterable(flat)):
        yield [(ChunkPart(number, 0, sizes[number]), group) for number, group in enumerate(flat)]
        return
    chunks = [
        [(part, tuple(tensor[part.begin : part.end] for tensor in flat[part.number])) for part in chunk]
        for chunk in chunks_of(sizes)
    ]
    for number in streamed([[each for _, parts in chunk for each in parts] for chunk in chunks], writes=writes):
        yield chunks[number]


def copy_between(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy from the second to the first of each pair, either of which may lie on a disk."""
    writes = any(disk_of(into) is not None for into, _ in pairs)
    for chunk in in_chunks(pairs, writes=writes):
        for _, (into, source) in chunk:
            # From a disk a GPU copies by way of a buffer: the host continues once the pages are read.
            into.copy_(source, non_blocking=True)
