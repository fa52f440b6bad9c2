"""How do this rank's pieces of a tensor become one global tensor in a checkpoint, and back, in any layout?

torch.distributed.checkpoint stores rectangles of named global tensors and reads whatever rectangles it is asked for. A
`GlobalTensor` tells it which rectangles this rank holds. The planners here replace the parts of torch's that know
torch.Tensor alone, and they check what torch does not: that every element asked for is really in the checkpoint.
"""

import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path

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

from megatronish.checkpoint.folder import DamagedError
from megatronish.checkpoint.metadata import Reader
from megatronish.errors import UserError
from megatronish.sharding import FlatPiece, Piece


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


def write_tensors(folder: Path, tensors: dict[str, GlobalTensor], *, alone: bool) -> None:
    """Write every rank's part of `tensors` into `folder`; all ranks call this (`alone`: there is one)."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with _plain_errors(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(dict(tensors), storage_writer=writer, planner=_SavePlanner(), no_dist=alone)


def read_tensors(folder: Path, tensors: dict[str, GlobalTensor], *, alone: bool) -> None:
    """Fill this rank's part of `tensors` from `folder`, saved in whatever layout."""
    with _plain_errors(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(dict(tensors), storage_reader=Reader(folder), planner=_LoadPlanner(), no_dist=alone)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The global shape of every tensor in a checkpoint."""
    metadata = Reader(folder).read_metadata()
    found = metadata.state_dict_metadata.items()
    return {name: tuple(stored.size) for name, stored in found if isinstance(stored, TensorStorageMetadata)}


class _plain_errors:  # noqa: N801 (reads as a statement)
    """torch wraps what went wrong on each rank into a BaseException of its own: unwrap the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, dcp.CheckpointException):
            rank, (first, _) = next(iter(sorted(error.failures.items())))
            if isinstance(first, UserError):
                raise first from error
            if isinstance(first, pickle.UnpicklingError) or "PytorchStreamReader" in str(first):
                raise DamagedError(self.folder, "what its files hold are no tensors") from error
            if isinstance(first, OSError):
                raise first from error
            raise RuntimeError(f"rank {rank}: {type(first).__name__}: {first}") from error
