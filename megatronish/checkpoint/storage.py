"""Storage of checkpoints: the writer and the reader of the files of tensors, with checksums and without running code.

torch.distributed.checkpoint decides which rank writes and reads which rectangle; the two classes here move the bytes,
one rectangle at a time. `CheckpointWriter` computes the checksum of each rectangle while it writes it, and
`CheckpointReader` verifies a rectangle before it unpickles it. A rank reads each rectangle that it needs once, however
many pieces of its shards lie in it, and it reads nothing else.
"""

import io
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

from megatronish.checkpoint.checksums import Checksums, DamagedError, Span, SummingStream
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


def _pickle_of(data: bytes) -> bytes:
    """Pickle of a torch file; an error of any class for what torch.save does not write."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("a record is compressed")
        # torch looks for `<folder of the first record>/data.pkl`, and capital letters are small ones to it.
        names = [record.filename.lower() for record in records]
        if len(set(names)) != len(names):
            raise ValueError("two records have one name")
        return archive.read(records[names.index(f"{names[0].partition('/')[0]}/data.pkl")])


def _is_dense(value: Any) -> bool:
    """Whether a value is a dense tensor on the CPU: not sparse, not nested, not of a subclass, not on meta."""
    plain = type(value) is Tensor and not value.is_nested
    return plain and value.device.type == "cpu" and value.layout == torch.strided


class _StoredRectangle(NamedTuple):
    """Place of a stored rectangle: `length` bytes of `file`, from `offset` on."""

    file: str
    offset: int
    length: int


class CheckpointReader(dcp.FileSystemReader):
    """Reader of a checkpoint's folder. DamagedError, with the name of the file, for a missing, short or changed file.

    `checks_all`: also check that every file of the checkpoint is there; one rank of many is enough.
    """

    def __init__(self, folder: Location, *, checks_all: bool = True) -> None:
        super().__init__(str(folder))  # a name alone: all reading is done here
        self.folder = folder
        # The order of trust: checksums.json verifies itself, it verifies .metadata, and only then that is unpickled.
        self.checksums = Checksums.read(folder)
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
        # Group the items by stored rectangle: one read, one checksum and one torch.load serve all its pieces.
        wanted: dict[_StoredRectangle, list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise DamagedError(self.folder, f"{item.dest_index.fqn} is no tensor in it")
            place = self.metadata.storage_data[item.storage_index]
            wanted.setdefault(_StoredRectangle(place.relative_path, place.offset, place.length), []).append(item)
        # Open each file once, and read its rectangles in the order of their offsets.
        for name, places in groupby(sorted(wanted), key=lambda place: place.file):
            with self.checksums.opened(name) as read:
                for place in places:
                    self._fill(wanted[place], read(place.offset, place.length), planner, name)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _fill(self, items: list[ReadItem], data: bytes, planner: LoadPlanner, name: str) -> None:
        """Copy the pieces of this rank that lie in one stored rectangle; `data` is its verified bytes.

        DamagedError unless the bytes are a dense tensor of the shape and dtype that .metadata says.
        """
        index = items[0].storage_index
        stored = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        sizes = next(chunk.sizes for chunk in stored.chunks if chunk.offsets == index.offset)
        what = f"what {name} holds of {index.fqn} is no tensor of {list(sizes)}"
        try:
            refuse_bombs(_pickle_of(data))
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # bytes that are no tensor may raise an error of any class
            raise DamagedError(self.folder, what) from error
        if not _is_dense(tensor) or (tensor.shape, tensor.dtype) != (sizes, stored.properties.dtype):
            raise DamagedError(self.folder, what)
        # Each piece, [*lengths] at `storage_offsets` of the stored rectangle, goes into a view of this rank's tensor.
        for item in items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(Piece((), item.storage_offsets, item.lengths).view(tensor))
            release(target)
