"""How do tensors get into the files of a checkpoint and out of them, every byte summed and no code run?

torch.distributed.checkpoint decides who writes and who reads what; these two move the bytes. The writer sums them on
their way. The reader verifies each stored rectangle before it takes it for a tensor, and reads it once, however many
pieces of this rank lie in it; it reads nothing else.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
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


class _SummedFiles(FileSystem):
    """Files that are summed while they are written."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as file, SummingStream(cast(Any, file)) as stream:
            yield stream
        self.spans[Path(path).name] = stream.spans

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.spans[Path(new_path).name] = self.spans.pop(Path(path).name)


class Writer(dcp.FileSystemWriter):
    """Torch's writer of a folder, which leaves the checksums of what it wrote there, too.

    A full disk is an OSError, whatever torch makes of it.
    """

    def __init__(self, folder: Path) -> None:
        # One tensor is resolved when the one before it is written: a conversion frees that one then (native.py).
        super().__init__(folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
        self.folder = folder
        self.fs = self.files = _SummedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file; none if it has nothing to write."""
        results: list[WriteResult] = []
        if plan.items:
            try:
                written = super().write_data(plan, planner).value()
            except RuntimeError as error:
                raise _cause(error) from error
            for result, span in zip(written, self.files.spans[written[0].storage_data.relative_path], strict=True):
                results.append(_SummedResult(result.index, result.size_in_bytes, result.storage_data, span))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the main rank, when all have written."""
        super().finish(metadata, results)
        spans: dict[str, list[Span]] = {}
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, _SummedResult)
            spans.setdefault(result.storage_data.relative_path, []).append(result.span)
        Checksums(self.folder, spans | {METADATA: self.files.spans[METADATA]}).write()


def _cause(error: BaseException) -> BaseException:
    """What the system said, if torch's writer has hidden it behind an error of its own."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


class _Stored(NamedTuple):
    """Where a rectangle of a tensor lies."""

    file: str
    offset: int
    length: int


class Reader(dcp.FileSystemReader):
    """A checkpoint's files. DamagedError, which names the file, for one that is missing, cut short or changed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.checksums = Checksums.read(folder)
        data = self.checksums.read_file(METADATA)
        try:
            self.metadata = parse_metadata(data)
        except Exception as error:  # a damaged pickle raises whatever its damage spells
            raise DamagedError(folder, f"{METADATA} cannot be read ({error})") from error

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
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (sizes, stored.properties.dtype):
            raise DamagedError(self.folder, what)
        for item in items:
            planner.resolve_tensor(item).detach().copy_(Piece((), item.storage_offsets, item.lengths).view(tensor))
