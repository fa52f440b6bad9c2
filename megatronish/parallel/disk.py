"""Disk memory: tensors in a file of a local disk, and the way through them chunk by chunk (--offload-folder).

ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857) keeps on NVMe what ZeRO-Offload keeps in the CPU's memory.
Here such a tensor is an ordinary one whose memory is a shared mapping of a file: whoever reads or writes it needs to
know nothing, and the system brings pages as they are touched. Page by page that is slow, and what was touched stays
until memory is short. So who goes through many tensors asks for copies of them, chunk by chunk (`in_chunks`): threads
read the next chunk into one buffer and write the last one from another, past the system's cache (O_DIRECT), while one
is computed with. The system keeps both ways consistent: it writes what is new in a mapping before it reads, and forgets
what it has mapped of what is written.

The file has no name: a run that is killed leaves nothing behind. Its blocks are allocated when a tensor is made: a disk
that is full says so then, and no write into a mapping ends a rank with SIGBUS later.
"""

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from megatronish.core.errors import RunError
from megatronish.core.files import remedy_of_writing
from megatronish.parallel.pinned import Form

CHUNK = 2**20
"""Elements of a parameter that are in memory together; a multiple of 2,048: pages of fp32, and rows of a norm."""
DEPTH = 1
"""Chunks that are read ahead of the one that is computed with."""
REQUEST = 2**20
"""Bytes that a thread asks the disk for at once."""
THREADS = 4

_LIBC = ctypes.CDLL(None, use_errno=True)  # whose calls let other threads of Python run meanwhile
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER


class _Region(mmap.mmap):
    """Mapping of a part of a file, which lives as long as the tensors in it."""

    file: "DiskFile"
    start: int
    """Of the part in the file, in bytes."""
    address: int


def _region_of(tensor: Tensor) -> _Region | None:
    # A view of a tensor, and a parameter made of it, have the same storage.
    return getattr(tensor.untyped_storage(), _OF_STORAGE, None) if tensor.device.type == "cpu" else None


_OF_STORAGE = "megatronish_region"
"""Attribute of the storage of tensors that lie in a file."""


def disk_of(tensor: Tensor) -> "DiskFile | None":
    """The file that the tensor lies in; None for one in memory."""
    region = _region_of(tensor)
    return None if region is None else region.file


class DiskFile:
    """File without a name in a folder, which grows by the tensors that are made in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.regions: WeakSet[_Region] = WeakSet()
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="offload")
        self._size, self._rings = 0, list[list[mmap.mmap]]()
        self.direct: int | None = None
        """Descriptor that reads and writes past the cache, where the file system can."""
        try:
            self.descriptor = _nameless(folder)
            with suppress(OSError):
                self.direct = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            raise self.failed(error) from error

    def __del__(self) -> None:
        self.threads.shutdown(wait=False)
        for descriptor in (getattr(self, "descriptor", None), self.direct):
            if descriptor is not None:
                os.close(descriptor)

    def zeros(self, forms: Sequence[Form]) -> list[Tensor]:
        """A tensor of zeros for each form, each from the start of a page on. RunError if the disk is full."""
        begins, size = list[int](), 0
        for form in forms:
            begins.append(size)
            size += _paged(form.num_bytes)
        if not size:
            return [torch.zeros(form.shape, dtype=form.dtype) for form in forms]
        region = self._grown_by(size)
        block = torch.frombuffer(region, dtype=torch.uint8)
        setattr(block.untyped_storage(), _OF_STORAGE, region)
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
        return region

    def release(self) -> None:
        """Write what is in memory of the whole file, and take it out."""
        for region in list(self.regions):
            _drop(_Span(region, 0, len(region)))

    def take_ring(self, number: int, size: int) -> list[mmap.mmap]:
        """So many buffers of at least so many bytes, from page to page, for one who goes through tensors."""
        ring = list[mmap.mmap]()
        with suppress(IndexError):  # a save in the background may have it
            ring = self._rings.pop()
        fits = len(ring) >= number and all(len(each) >= size for each in ring)
        return ring if fits else [mmap.mmap(-1, size) for _ in range(number)]

    def give_back(self, ring: list[mmap.mmap]) -> None:
        """Keep the buffers for the next one."""
        self._rings = [ring]

    def failed(self, error: OSError) -> RunError:
        """What a rank says when the disk fails."""
        return RunError(
            f"a file in --offload-folder {self.folder} could not be written: {error.strerror or error}; "
            f"{remedy_of_writing(error, self.folder)} or name another folder"
        )


def _paged(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


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


# What tensors have in memory beside the way through them in chunks: pages of the mapping that a reader has touched.


class _Span(NamedTuple):
    """Bytes of a mapping, from its start."""

    region: _Region
    begin: int
    end: int

    @property
    def place(self) -> int:
        """Of the first byte in the file."""
        return self.region.start + self.begin


def _span_of(tensor: Tensor) -> _Span | None:
    region = _region_of(tensor)
    if region is None or not tensor.numel():
        return None
    begin = tensor.data_ptr() - region.address
    return _Span(region, begin, begin + tensor.numel() * tensor.element_size())


def release(*tensors: Tensor) -> None:
    """Write what is in memory of these tensors to their disk and take it out; nothing for those in memory."""
    for tensor in tensors:
        if (span := _span_of(tensor)) is not None:
            _drop(span)


def _drop(span: _Span) -> None:
    """Unmap the pages, write what is new of them, and give their memory back, in this order: mapped pages stay."""
    page, (region, begin, end) = mmap.PAGESIZE, span
    begin, size = begin // page * page, _paged(end) - begin // page * page
    _call(_LIBC.madvise, ctypes.c_void_p(region.address + begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    _write_out(region.file, region.start + begin, size)


def _write_out(file: DiskFile, place: int, size: int) -> None:
    """Have the system write what it has of the file there, and forget it."""
    _call(_LIBC.sync_file_range, file.descriptor, ctypes.c_int64(place), ctypes.c_int64(size), _WRITE_AND_WAIT)
    os.posix_fadvise(file.descriptor, place, size, os.POSIX_FADV_DONTNEED)


def ask_for(tensors: Iterable[Tensor]) -> None:
    """Have the system begin to read these tensors of a disk, and return at once."""
    for tensor in tensors:
        if (span := _span_of(tensor)) is not None:
            for place in range(span.place, span.region.start + span.end, REQUEST):  # it reads no more for one call
                size = min(REQUEST, span.region.start + span.end - place)
                os.posix_fadvise(span.region.file.descriptor, place, size, os.POSIX_FADV_WILLNEED)


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# The way through tensors in chunks. Chunk i is computed with while chunk i + 1 is read and chunk i - 1 is written: with
# DEPTH chunks ahead there are DEPTH + 2 buffers, and a buffer is read into only when all of it has been written.


class ChunkPart(NamedTuple):
    """Elements `begin` to `end` of the tensor of this number among several."""

    number: int
    begin: int
    end: int


Chunk = list[tuple[ChunkPart, tuple[Tensor, ...]]]
"""Parts of groups of tensors, flat."""


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


def in_chunks(groups: Sequence[Sequence[Tensor]], *, num_written: int) -> Iterator[Chunk]:
    """Groups of contiguous tensors of one size, chunk by chunk: of those on a disk copies, until the next is asked for.

    The first `num_written` of each group are written back then. Groups that are all in memory are one chunk, as they
    are. RunError if the disk fails.
    """
    flat = [tuple(tensor.detach().view(-1) for tensor in group) for group in groups]
    sizes = [group[0].numel() for group in flat]
    disks = {disk for group in flat for tensor in group if (disk := disk_of(tensor)) is not None}
    if not disks:
        yield [(ChunkPart(number, 0, sizes[number]), group) for number, group in enumerate(flat)]
        return
    chunks: list[Chunk] = [
        [(part, tuple(tensor[part.begin : part.end] for tensor in flat[part.number])) for part in parts]
        for parts in chunks_of(sizes)
    ]
    (disk,) = disks
    try:
        disk.release()  # what others have touched since the last time
        yield from _streamed(disk, chunks, num_written)
    except OSError as error:
        raise disk.failed(error) from error


def _streamed(disk: DiskFile, chunks: Sequence[Chunk], num_written: int) -> Iterator[Chunk]:
    number_of_buffers = min(DEPTH + 2, len(chunks))
    ring = disk.take_ring(number_of_buffers, max(map(_bytes_in_buffer, chunks), default=0))
    copies, reading = list[Chunk](), list[list[Future[None]]]()
    writing: list[list[Future[None]]] = [[] for _ in chunks]
    for number in range(len(chunks)):
        # 1. Start to read the chunks ahead, each into the buffer of a chunk that has been written.
        while len(copies) < min(number + number_of_buffers - 1, len(chunks)) or len(copies) <= number:
            ahead = len(copies)
            if ahead >= number_of_buffers:
                _wait(writing[ahead - number_of_buffers])
            copy, spans = _copies_in(ring[ahead % number_of_buffers], chunks[ahead])
            reading.append(_asked(disk, spans, _read))
            copies.append(copy)
        # 2. Hand out this one, and start to write it.
        _wait(reading[number])
        yield copies[number]
        _, spans = _copies_in(ring[number % number_of_buffers], chunks[number], num_written)
        writing[number] = _asked(disk, spans, _write)
        copies[number], reading[number] = [], []
    _wait(chain.from_iterable(writing))
    disk.give_back(ring)


def _wait(futures: Iterable["Future[None]"]) -> None:
    for each in futures:
        each.result()


def _bytes_in_buffer(chunk: Chunk) -> int:
    tensors = [tensor for _, group in chunk for tensor in group if _region_of(tensor) is not None]
    return sum(_paged(tensor.numel() * tensor.element_size()) for tensor in tensors)


def _copies_in(
    buffer: mmap.mmap, chunk: Chunk, first: int | None = None
) -> tuple[Chunk, list[tuple[_Span, memoryview]]]:
    """The chunk with copies in the buffer of what is on a disk, and the memory of the `first` of each group there."""
    block, begin = torch.frombuffer(buffer, dtype=torch.uint8), 0
    copied, spans = Chunk(), list[tuple[_Span, memoryview]]()
    for part, group in chunk:
        tensors = list[Tensor]()
        for number, tensor in enumerate(group):
            if (span := _span_of(tensor)) is None:
                tensors.append(tensor)
                continue
            size = span.end - span.begin
            tensors.append(block[begin : begin + size].view(tensor.dtype))
            if first is None or number < first:
                spans.append((span, memoryview(buffer)[begin : begin + size]))
            begin += _paged(size)
        copied.append((part, tuple(tensors)))
    return copied, spans


Transfer = Callable[[DiskFile, int, memoryview, bool], None]


def _asked(disk: DiskFile, spans: Sequence[tuple[_Span, memoryview]], transfer: Transfer) -> list[Future[None]]:
    return [disk.threads.submit(request) for span in spans for request in _requests(*span, transfer)]


def _requests(span: _Span, memory: memoryview, transfer: Transfer) -> Iterator[Callable[[], None]]:
    """What threads are asked for. Past the cache go whole pages alone; a rest, or what begins elsewhere, through it."""
    file, page = span.region.file, mmap.PAGESIZE
    is_direct = file.direct is not None and span.place % page == 0
    whole = len(memory) // page * page if is_direct else 0
    for begin in range(0, whole, REQUEST):
        end = min(begin + REQUEST, whole)
        yield partial(transfer, file, span.place + begin, memory[begin:end], True)
    if whole < len(memory):
        yield partial(transfer, file, span.place + whole, memory[whole:], False)


def _read(file: DiskFile, place: int, memory: memoryview, is_direct: bool) -> None:
    descriptor = file.direct if is_direct and file.direct is not None else file.descriptor
    done = 0
    while done < len(memory):
        number = os.preadv(descriptor, [memory[done:]], place + done)
        if not number:
            raise OSError(errno.EIO, "the file ends too early")
        done += number
    if not is_direct and len(memory) >= mmap.PAGESIZE:
        os.posix_fadvise(file.descriptor, place, len(memory), os.POSIX_FADV_DONTNEED)


def _write(file: DiskFile, place: int, memory: memoryview, is_direct: bool) -> None:
    descriptor = file.direct if is_direct and file.direct is not None else file.descriptor
    done = 0
    while done < len(memory):
        done += os.pwritev(descriptor, [memory[done:]], place + done)
    if not is_direct and len(memory) >= mmap.PAGESIZE:
        _write_out(file, place, len(memory))


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor, or of one on a disk a copy in the CPU's memory."""
    if disk_of(tensor) is None:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_between([(copy, tensor)])
    return copy


def extremes_of(tensor: Tensor) -> Tensor:
    """[2]: the smallest and the largest element, or NaN where one is; it takes no memory."""
    low, high = zip(*(torch.aminmax(piece) for piece in pieces_of(tensor)), strict=True)
    return torch.stack((torch.stack(low).amin(), torch.stack(high).amax()))


def pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a contiguous tensor, flat, piece by piece; a tensor in memory as a whole."""
    for chunk in in_chunks([(tensor,)], num_written=0):
        for _, (piece,) in chunk:
            yield piece


def copy_between(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy from the second to the first of each pair, either of which may lie on a disk."""
    on_disk = any(disk_of(tensor) is not None for tensor in chain.from_iterable(pairs))
    for chunk in in_chunks(pairs, num_written=1):
        for _, (into, source) in chunk:
            into.copy_(source, non_blocking=not on_disk)  # the next chunk takes the place of a buffer
