"""How do tensors get into the files of a checkpoint and out of them, every byte summed and no code run?

torch.distributed.checkpoint decides who writes and who reads what; these two move the bytes, a tensor at a time. The
writer sums them on their way. The reader verifies each stored rectangle before it takes it for a tensor, and reads it
once, however many pieces of this rank lie in it; it reads nothing else.
"""

import io
import os
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
from megatronish.sharding import Piece


@dataclass(frozen=True)
class _SummedResult(WriteResult):
    """What was written of a tensor, and its sum: travels to the main rank, as torch's own does."""

    span: Span


class Writer(dcp.FileSystemWriter):
    """A folder of files, one for each rank that has something to write, and their checksums.

    Not torch's own loop over the tensors: that keeps all of them until the file is complete, and from a thread it waits
    for the stream of another rank's GPU. A full disk is an OSError, which torch.save would hide.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the file of each rank."""
        return [replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file."""
        name: str = plan.storage_data
        results: list[WriteResult] = []
        if plan.items:
            try:
                with (self.folder / name).open("wb") as file, SummingStream(file) as stream:
                    for item in plan.items:
                        start = stream.tell()
                        torch.save(_compact(planner.resolve_data(item)), cast(IO[bytes], stream))
                        length = stream.tell() - start
                        place = _StorageInfo(name, start, length)
                        results.append(_SummedResult(item.index, length, place, stream.spans[-1]))
                    stream.flush()
                    os.fsync(stream.fileno())
            except RuntimeError as error:
                raise _cause(error) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the main rank, when all have written."""
        super().finish(metadata, results)
        with (self.folder / METADATA).open("rb") as file:
            os.fsync(file.fileno())  # torch does so before it has handed all of it to the system
        spans: dict[str, list[Span]] = {}
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, _SummedResult)
            spans.setdefault(result.storage_data.relative_path, []).append(result.span)
        Checksums(self.folder, spans).write()


def _compact(found: Any) -> Tensor:
    """On the host, in memory of its own: torch.save would write all of the tensor that a view belongs to."""
    tensor = found.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _cause(error: BaseException) -> BaseException:
    """What the system said, if torch's writer has hidden it behind an error of its own."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def _is_plain(found: Any) -> bool:
    """Whether it is a tensor that holds its numbers, and not a sparse one, one of tensors, one of shape alone."""
    plain = type(found) is Tensor and not found.is_nested
    return plain and found.device.type == "cpu" and found.layout == torch.strided


class _Stored(NamedTuple):
    """Where a rectangle of a tensor lies."""

    file: str
    offset: int
    length: int


class Reader(dcp.FileSystemReader):
    """A checkpoint's files. DamagedError, which names the file, for one that is missing, cut short or changed.

    Of many readers one alone need look whether all files are there, `checks_all`.
    """

    def __init__(self, folder: Path, *, checks_all: bool = True) -> None:
        super().__init__(folder)
        self.folder = folder
        self.checksums = Checksums.read(folder)
        if checks_all:
            self.checksums.check_lengths()
        data = self.checksums.read_file(METADATA)
        try:
            self.metadata = parse_metadata(data)
        except Exception as error:  # a damaged pickle raises whatever its damage spells
            told = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:200])
            raise DamagedError(folder, f"{METADATA} cannot be read ({told})") from error

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """As torch asks for it."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for."""
        wanted: dict[_Stored, list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise DamagedError(self.folder, f"{item.dest_index.fqn} is no tensor in it")
            place = self.metadata.storage_data[item.storage_index]
            wanted.setdefault(_Stored(place.relative_path, place.offset, place.length), []).append(item)
        for name, places in groupby(sorted(wanted), key=lambda place: place.file):
            with self.checksums.opened(name) as read:
                for place in places:
                    self._fill(wanted[place], read(place.offset, place.length), planner, name)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _fill(self, items: list[ReadItem], data: bytes, planner: LoadPlanner, name: str) -> None:
        """All pieces of this rank that lie in one stored rectangle."""
        index = items[0].storage_index
        stored = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        sizes = next(chunk.sizes for chunk in stored.chunks if chunk.offsets == index.offset)
        what = f"what {name} holds of {index.fqn} is no tensor of {list(sizes)}"
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # what is no tensor raises whatever its bytes spell
            raise DamagedError(self.folder, what) from error
        if not _is_plain(tensor) or (tensor.shape, tensor.dtype) != (sizes, stored.properties.dtype):
            raise DamagedError(self.folder, what)
        for item in items:
            planner.resolve_tensor(item).detach().copy_(Piece((), item.storage_offsets, item.lengths).view(tensor))
