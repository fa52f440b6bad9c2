"""Storage of checkpoints: the writer and the reader of the files of tensors, with checksums and without running code.

torch.distributed.checkpoint decides which rank writes and reads which rectangle; the two classes here move the bytes,
one rectangle at a time. `CheckpointWriter` computes the checksum of each rectangle while it writes it, and
`CheckpointReader` verifies a rectangle before it unpickles it. A rank reads each rectangle that it needs once, however
many pieces of its shards lie in it, and it reads nothing else.
"""

import os
import tempfile
import zipfile
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatronish.checkpoint.checksums import Checksums, DamagedError, OpenedFile, Span, SpanStream, SummingStream
from megatronish.checkpoint.metadata import METADATA, parse_metadata
from megatronish.core.pickles import refuse_bombs
from megatronish.core.remote import Location, RemoteFile, RemotePath
from megatronish.parallel.disk import in_memory, release
from megatronish.parallel.sharding import Piece


@dataclass(frozen=True)
class _SummedResult(WriteResult):
    """Record of one written rectangle, torch's with the checksum; the main rank gathers the records of all ranks."""

    span: Span


class CheckpointWriter(dcp.FileSystemWriter):
    """Writer of a checkpoint's folder: one file for each rank that has tensors to write, and their checksums.

    It replaces torch's own loop over the tensors, which keeps all of them in memory until the file is complete, and in
    a thread waits for the stream of another rank's GPU. OSError if the disk is full or fails, which torch.save hides.
    """

    def __init__(self, folder: Location) -> None:
        super().__init__(Path(str(folder)))  # of a store a name alone
        self.folder = folder

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Plan of this rank as it is; the folder is made if it is on a disk."""
        if isinstance(self.folder, Path):
            self.folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Plans of all ranks, each with the name of its rank's file."""
        return [replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, one rectangle after the other; the result has a record for each of them.

        Raises OSError if the disk is full or fails.
        """
        name: str = plan.storage_data
        results: list[WriteResult] = []
        if plan.items:
            try:
                with (self.folder / name).open("wb") as file, SummingStream(file) as stream:
                    # One rectangle is one span: torch.save of a tensor of its sizes. `tell` ends the span and computes
                    # its sum, so a rectangle is in memory once, and its bytes are not read again.
                    for item in plan.items:
                        start = stream.tell()
                        torch.save(compact(planner.resolve_data(item)), cast(IO[bytes], stream))
                        length = stream.tell() - start
                        place = _StorageInfo(name, start, length)
                        results.append(_SummedResult(item.index, length, place, stream.spans[-1]))
                    # The checkpoint is renamed only when all of its bytes are on the disk.
                    stream.flush()
                    if not isinstance(file, RemoteFile):
                        os.fsync(file.fileno())
            except RuntimeError as error:
                raise cause_of(error) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write .metadata and the checksums of all files; the main rank calls this when all ranks have written."""
        if isinstance(self.folder, RemotePath):
            with tempfile.TemporaryDirectory(prefix="megatronish-") as aside:  # torch writes .metadata to a disk
                self.path = Path(aside)
                super().finish(metadata, results)
                with (self.folder / METADATA).open("wb") as remote:
                    remote.write((self.path / METADATA).read_bytes())
        else:
            super().finish(metadata, results)
            with (self.folder / METADATA).open("rb") as file:
                os.fsync(file.fileno())  # torch calls fsync before the last bytes have left its buffer
        # Spans of each file in the order of writing, so that together they are the whole file.
        spans: dict[str, list[Span]] = {}
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, _SummedResult)
            spans.setdefault(result.storage_data.relative_path, []).append(result.span)
        Checksums(self.folder, spans).write()


def compact(view: Any) -> Tensor:
    """Tensor on the host in memory of its own: of a view, torch.save would write the whole storage."""
    tensor = in_memory(view.detach()).cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def cause_of(error: BaseException) -> BaseException:
    """OSError that torch's writer has wrapped in an error of its own; the error itself if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


class _StoredRectangle(NamedTuple):
    """Place of a stored rectangle: `length` bytes of `file`, from `offset` on."""

    file: str
    offset: int
    length: int


FEW, LARGE = 4, 2**20
"""Of a rectangle of more bytes than LARGE, one row in FEW or less is read alone."""


class _Form(NamedTuple):
    """What the pickle of a stored tensor says of it, and where its elements begin in the bytes of its rectangle."""

    tensor: Tensor  # on the meta device
    start: int


def _form_of(span: SpanStream) -> _Form:
    """Form of a stored tensor, whose elements are not read; an error of any class for what is no dense tensor."""
    stream = cast(IO[bytes], span)
    refuse_bombs(_pickle_of(stream))
    stream.seek(0)
    tensor = torch.load(stream, map_location="meta", weights_only=True)
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout != torch.strided:
        raise ValueError(type(tensor))
    start = tensor.untyped_storage()._checkpoint_offset  # where its record lies: torch notes it on a meta storage
    if start is None:
        raise ValueError("no place of its elements")
    return _Form(tensor, start)


def _tensor_in(data: bytearray, form: _Form) -> Tensor:
    """Tensor whose elements are those of the bytes, not copied."""
    like = form.tensor
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    count = like.untyped_storage().nbytes() // like.itemsize
    flat = torch.frombuffer(data, dtype=like.dtype, count=count, offset=form.start)
    return flat.as_strided(like.shape, like.stride(), like.storage_offset())


def _rows_in(file: OpenedFile, place: _StoredRectangle, rows: range) -> Tensor:
    """Rows of the stored tensor of a verified rectangle."""
    like, start = _form_of(file.stream(place.offset, place.length))
    if not like.is_contiguous():  # then its rows lie apart
        return _tensor_in(file.part(place.offset, place.length), _Form(like, start))[rows.start : rows.stop]
    row = int(like.stride(0)) * like.itemsize
    begin = place.offset + start + int(like.storage_offset()) * like.itemsize + rows.start * row
    data = file.part(begin, len(rows) * row)
    return torch.frombuffer(data, dtype=like.dtype).view(len(rows), *like.shape[1:])


def _rows_of(items: list[ReadItem]) -> range | None:
    """Rows of a rectangle's first dim that hold all pieces; None for a scalar, and for what has no elements."""
    if not all(len(item.lengths) and all(item.lengths) for item in items):
        return None
    begins = [item.storage_offsets[0] for item in items]
    return range(min(begins), max(begin + item.lengths[0] for begin, item in zip(begins, items, strict=True)))


def _pickle_of(stream: IO[bytes]) -> bytes:
    """Pickle of a torch file; an error of any class for what torch.save does not write."""
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("a record is compressed")
        # torch looks for `<folder of the first record>/data.pkl`, and capital letters are small ones to it.
        names = [record.filename.lower() for record in records]
        if len(set(names)) != len(names):
            raise ValueError("two records have one name")
        return archive.read(records[names.index(f"{names[0].partition('/')[0]}/data.pkl")])


class CheckpointReader(dcp.FileSystemReader):
    """Reader of a checkpoint's folder. DamagedError, with the name of the file, for a missing, short or changed file.

    `checks_all`: also check that every file of the checkpoint is there; one rank of many is enough.
    """

    def __init__(self, folder: Location, *, checks_all: bool = True) -> None:
        super().__init__(str(folder))  # a name alone: all reading is done here
        self.folder = folder
        # The order of trust: checksums.json verifies itself, it verifies .metadata, and only then that is unpickled.
        self.checksums = Checksums.read(folder)
        self._verified = set[_StoredRectangle]()
        if checks_all:
            self.checksums.check_lengths()
        data = self.checksums.read_file(METADATA)
        try:
            self.metadata = parse_metadata(data)
        except Exception as error:  # a damaged pickle may raise an error of any class
            reason = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:200])
            raise DamagedError(folder, f"{METADATA} cannot be read ({reason})") from error

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Metadata of the checkpoint, read and checked by the constructor; torch passes arguments that are not used."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the rectangles of the plan and copy the planned parts of them into this rank's tensors."""
        # Group the items by stored rectangle: one read, one checksum and one unpickling serve all its pieces.
        wanted: dict[_StoredRectangle, list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise DamagedError(self.folder, f"{item.dest_index.fqn} is no tensor in it")
            place = self.metadata.storage_data[item.storage_index]
            wanted.setdefault(_StoredRectangle(place.relative_path, place.offset, place.length), []).append(item)
        # Open each file once, and read its rectangles in the order of their offsets.
        for name, places in groupby(sorted(wanted), key=lambda place: place.file):
            with self.checksums.opened(name) as file:
                for place in places:
                    self._fill(wanted[place], file, place, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _fill(self, items: list[ReadItem], file: OpenedFile, place: _StoredRectangle, planner: LoadPlanner) -> None:
        """Copy the pieces of this rank that lie in one stored rectangle, whose bytes are verified before they are used.

        DamagedError unless they are a dense tensor of the shape and dtype that .metadata says.
        """
        index = items[0].storage_index
        stored = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        sizes = next(chunk.sizes for chunk in stored.chunks if chunk.offsets == index.offset)
        rows = _rows_of(items)
        try:
            if rows is None or (rows.stop - rows.start) * FEW > sizes[0] or place.length < LARGE:
                data = file.read(place.offset, place.length)
                rows, tensor = range(0), _tensor_in(data, _form_of(SpanStream.of(data)))
            else:  # an expert of many: what is not wanted is read once to be verified, and never held
                if place not in self._verified:
                    file.verify(place.offset, place.length)
                    self._verified.add(place)
                tensor = _rows_in(file, place, rows)
            wanted = (len(rows), *sizes[1:]) if rows else tuple(sizes)
            if (tuple(tensor.shape), tensor.dtype) != (wanted, stored.properties.dtype):
                raise ValueError(tensor.shape)
        except (DamagedError, OSError, MemoryError):
            raise
        except Exception as error:  # bytes that are no tensor may raise an error of any class
            what = f"what {place.file} holds of {index.fqn} is no tensor of {list(sizes)}"
            raise DamagedError(self.folder, what) from error
        # Each piece, [*lengths] at `storage_offsets` of the stored rectangle, goes into a view of this rank's tensor.
        for item in items:
            target = planner.resolve_tensor(item).detach()
            offsets = tuple(item.storage_offsets)
            if rows:
                offsets = (offsets[0] - rows.start, *offsets[1:])
            target.copy_(Piece((), offsets, item.lengths).view(tensor))
            release(target)
