"""How do this rank's pieces of a tensor become one global tensor in a checkpoint, and back, in any layout?

torch.distributed.checkpoint stores rectangles of named global tensors and reads whatever rectangles it is asked for. A
`GlobalTensor` tells it which rectangles this rank holds. The planners here replace the parts of torch's that know
torch.Tensor alone, and they check what torch does not: that every element asked for is really in the checkpoint.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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

from megatronish.checkpoint.all_or_none import all_or_none
from megatronish.checkpoint.storage import Reader, Writer
from megatronish.errors import UserError
from megatronish.mesh import Axis
from megatronish.sharding import FlatPiece, Piece

ALONE = Axis("alone")


@dataclass(frozen=True)
class GlobalTensor:
    """This rank's rectangles of a global tensor: [*shape] in all, `local` here.

    Of the ranks that hold the same rectangles one alone `writes` them; all read.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece | FlatPiece, ...]
    local: Tensor
    writes: bool

    def size(self) -> torch.Size:
        """The global shape, as torch asks for it."""
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
    """A whole tensor that is read when it is its turn to be written: it takes the place of a GlobalTensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def __create_write_items__(self, name: str, _object: object) -> list[WriteItem]:
        size = torch.Size(self.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=size)
        return [WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.read().contiguous()


class _SavePlanner(dcp.DefaultSavePlanner):
    """Torch's planner, for global tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Torch's planner, for global tensors, and with a look at whether all of them is there."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        found = dict.fromkeys(self.state_dict, 0)
        for item in plan.items:
            found[item.dest_index.fqn] += item.lengths.numel()
        for name, tensor in self.state_dict.items():
            asked = sum(torch.Size(piece.sizes).numel() for piece in tensor.pieces)
            if found[name] != asked:
                raise UserError(f"{name} is not whole in the checkpoint: {found[name]} of {asked} elements are there")
        return plan

    def load_bytes(self, read_item: ReadItem, _value: object) -> None:
        raise UserError(f"{read_item.dest_index.fqn} is no tensor in the checkpoint: the file is not one of ours")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def write_tensors(folder: Path, tensors: Mapping[str, GlobalTensor | UnreadTensor], *, over: Axis) -> None:
    """Write every rank's part of `tensors` into `folder`; all ranks of the axis call this."""
    with _plain_errors():
        dcp.save(
            dict(tensors),
            storage_writer=Writer(folder),
            planner=_SavePlanner(),
            process_group=over.group,
            no_dist=over.size == 1,
        )


def read_tensors(source: Path | Reader, tensors: dict[str, GlobalTensor], *, over: Axis = ALONE) -> None:
    """Fill this rank's part of `tensors` from a checkpoint, saved in whatever layout; all ranks of the axis call this.

    Who reads tensor by tensor makes one `Reader` and hands it in each time.
    """
    reader = source if isinstance(source, Reader) else all_or_none(over, partial(Reader, source))
    with _plain_errors():
        dcp.load(
            dict(tensors),
            storage_reader=reader,
            planner=_LoadPlanner(),
            process_group=over.group,
            no_dist=over.size == 1,
        )


class StoredTensor(NamedTuple):
    """A global tensor as a checkpoint describes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(reader: Reader) -> dict[str, StoredTensor]:
    """Every tensor in a checkpoint, by name."""
    found = reader.metadata.state_dict_metadata.items()
    return {
        name: StoredTensor(tuple(stored.size), stored.properties.dtype)
        for name, stored in found
        if isinstance(stored, TensorStorageMetadata)
    }


def stored_shapes(reader: Reader) -> dict[str, tuple[int, ...]]:
    """The global shape of every tensor in a checkpoint."""
    return {name: stored.shape for name, stored in stored_tensors(reader).items()}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """torch wraps what went wrong on each rank into a BaseException of its own: unwrap the first."""
    # Not for this block alone: saving may go on beside training, and what a block changes here holds for all threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (first, trace) = min(error.failures.items())
        if isinstance(first, (UserError, OSError)):
            raise first from error
        told = "".join([*traceback.format_list(trace), *traceback.format_exception_only(first)])
        raise RuntimeError(f"rank {rank}: {told}") from error
