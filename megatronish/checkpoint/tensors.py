"""Global tensors: this rank's pieces of named tensors, written to a checkpoint and read from one of any layout.

torch.distributed.checkpoint stores rectangles of named global tensors and reads whatever rectangles it is asked for;
rectangles that were cut otherwise at saving are cut and put together in reading. A `GlobalTensor` lists the rectangles
that this rank holds. The planners here replace the parts of torch's planners that accept only torch.Tensor, and they
check what torch does not check: that every requested element is in the checkpoint.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, TensorWriteData, WriteItem, WriteItemType

from megatronish.checkpoint.storage import CheckpointReader, CheckpointWriter
from megatronish.core.errors import UserError
from megatronish.core.remote import Location
from megatronish.parallel import comm
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import FlatPiece, Piece

ALONE = Axis("alone")


@dataclass(frozen=True)
class GlobalTensor:
    """This rank's rectangles, `pieces`, of a global tensor [*shape]; `local` holds their elements.

    Of the ranks that hold the same rectangles exactly one has `writes`; all of them read. The methods with two
    underscores are torch's protocol for objects that its planners can save and load.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece | FlatPiece, ...]
    local: Tensor
    writes: bool

    def size(self) -> torch.Size:
        """Global shape, under the name that torch calls."""
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _object: object) -> list[WriteItem]:
        if not self.writes:
            return []
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self.local), size=self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(p.global_offset), torch.Size(p.sizes)) for p in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        piece = next(piece for piece in self.pieces if torch.Size(piece.global_offset) == index.offset)
        return piece.view(self.local.detach())


@dataclass(frozen=True)
class UnreadTensor:
    """Whole tensor that is read only when it is written, used in place of a GlobalTensor.

    With `part`, which reads the rows [start, stop) of the first dim, each row is a rectangle of its own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    part: Callable[[int, int], Tensor] | None = None

    def __create_write_items__(self, name: str, _object: object) -> list[WriteItem]:
        size = torch.Size(self.shape)
        zeros = (0,) * len(size)
        chunks = [ChunkStorageMetadata(torch.Size(zeros), size)]
        # A rectangle for each row of a stack: writing then has one expert in memory, and a reader of one expert reads
        # no other.
        if self.part is not None:
            row = torch.Size((1, *size[1:]))
            chunks = [ChunkStorageMetadata(torch.Size((number, *zeros[1:])), row) for number in range(size[0])]
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if self.part is None:
            return self.read().contiguous()
        assert index.offset is not None
        return self.part(index.offset[0], index.offset[0] + 1).contiguous()


class _SavePlanner(dcp.DefaultSavePlanner):
    """Torch's planner of a save, for global tensors: it returns the view that one write item names."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Torch's planner of a load, for global tensors; it also checks that the checkpoint has every requested element."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    # Without torch's preparations (meta tensors, nested dicts), which know torch.Tensor alone.
    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        # torch leaves out, without an error, what no stored rectangle covers. Stored rectangles do not overlap
        # (metadata.py), so equal numbers of elements mean that all of them are covered.
        planned = dict.fromkeys(self.state_dict, 0)
        for item in plan.items:
            planned[item.dest_index.fqn] += item.lengths.numel()
        for name, tensor in self.state_dict.items():
            wanted = sum(torch.Size(piece.sizes).numel() for piece in tensor.pieces)
            if planned[name] != wanted:
                raise UserError(
                    f"{name} is not whole in the checkpoint: {planned[name]} of {wanted} elements are there"
                )
        return plan

    def load_bytes(self, read_item: ReadItem, _value: object) -> None:
        raise UserError(f"{read_item.dest_index.fqn} is no tensor in the checkpoint: the file is not one of ours")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def write_tensors(folder: Location, tensors: Mapping[str, GlobalTensor | UnreadTensor], *, over: Axis) -> None:
    """Write the tensors of all ranks into `folder`; all ranks of the axis call this. OSError if the disk is full."""
    # torch communicates inside by itself: the record has the whole call as one entry, which a watchdog knows to be work
    # on the disk, too.
    with _unwrapped_errors(), comm.entered("writing of tensors", over):
        dcp.save(
            dict(tensors),
            storage_writer=CheckpointWriter(folder),
            planner=_SavePlanner(),
            process_group=over.group,
            no_dist=over.size == 1,
        )


def read_tensors(source: Location | CheckpointReader, tensors: dict[str, GlobalTensor], *, over: Axis = ALONE) -> None:
    """Fill this rank's part of `tensors` from a checkpoint of any layout; all ranks of the axis call this.

    A caller that reads tensor by tensor makes one `CheckpointReader` and passes it each time. UserError if an element
    is not in the checkpoint, DamagedError if bytes differ from what was written.
    """
    reader = source if isinstance(source, CheckpointReader) else all_or_none(over, partial(CheckpointReader, source))
    with _unwrapped_errors(), comm.entered("reading of tensors", over):
        dcp.load(
            dict(tensors),
            storage_reader=reader,
            planner=_LoadPlanner(),
            process_group=over.group,
            no_dist=over.size == 1,
        )


def files_for(tensors: dict[str, GlobalTensor], reader: CheckpointReader) -> set[str]:
    """Names of the checkpoint's files in which this rank's part of `tensors` lies."""
    planner = _LoadPlanner()
    planner.set_up_planner(tensors, reader.metadata)
    items = planner.create_local_plan().items
    return {reader.metadata.storage_data[item.storage_index].relative_path for item in items}


class StoredTensor(NamedTuple):
    """Global shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(reader: CheckpointReader) -> dict[str, StoredTensor]:
    """Shapes and dtypes of all tensors in a checkpoint, by name."""
    entries = reader.metadata.state_dict_metadata.items()
    return {
        name: StoredTensor(tuple(stored.size), stored.properties.dtype)
        for name, stored in entries
        if isinstance(stored, TensorStorageMetadata)
    }


def stored_shapes(reader: CheckpointReader) -> dict[str, tuple[int, ...]]:
    """Global shapes of all tensors in a checkpoint, by name."""
    return {name: stored.shape for name, stored in stored_tensors(reader).items()}


@contextmanager
def _unwrapped_errors() -> Iterator[None]:
    """Context that raises the error of the lowest failed rank instead of torch's CheckpointException around it."""
    # Not warnings.catch_warnings: filters belong to the process, and a thread may save while others change them.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (first, trace) = min(error.failures.items())
        # Errors of ours and of the disk are sentences, and an interrupt is none; of any other the trace of its rank is
        # what helps.
        if isinstance(first, (UserError, OSError, KeyboardInterrupt)):
            raise first from error
        details = "".join([*traceback.format_list(trace), *traceback.format_exception_only(first)])
        raise RuntimeError(f"rank {rank}: {details}") from error
