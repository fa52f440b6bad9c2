"""Listing of a checkpoint of torch.distributed.checkpoint that others write: which bytes of which file hold which part.

Its `.metadata` is a pickle of torch's classes, read without running code (metadata.py), and written as torch writes it.
A rectangle is the output of torch.save, some bytes of a `.distcp` file. In contrast to our own checkpoints there are no
checksums, and there may be objects that are no tensors, which are not read.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatronish.checkpoint.metadata import METADATA, OBJECT, parse_metadata

_PLANNER = "torch.distributed.checkpoint.planner"
_CORE = "megatron.core.dist_checkpointing.strategies.torch"
_MORE = {
    ("torch.distributed.checkpoint.metadata", OBJECT): OBJECT,
    **{
        (_PLANNER, name): name
        for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    },
    (_CORE, "MCoreMetadata"): "Metadata",  # of its versions before 0.16
    (_CORE, "MCoreSavePlan"): "SavePlan",
}
"""Names that Megatron-LM's pickles have in addition: objects, the plans of all ranks, and its own versions of both."""


class BytesPlace(NamedTuple):
    """Place of something in the files: `length` bytes of `file`, from `start` on."""

    file: str
    start: int
    length: int


class Rectangle(NamedTuple):
    """Stored rectangle [*sizes] of a tensor, at `offsets` in it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: BytesPlace


class ListedTensor(NamedTuple):
    """Tensor in a listing; its rectangles do not overlap, and may leave gaps."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rectangles: tuple[Rectangle, ...]


class Listing(NamedTuple):
    """Tensors by name, and the places of the objects that are none."""

    tensors: dict[str, ListedTensor]
    objects: dict[str, BytesPlace]


def read_listing(folder: Path) -> Listing:
    """Listing of a folder; raises an exception of any class if its `.metadata` is not what torch writes there."""
    metadata = parse_metadata((folder / METADATA).read_bytes(), more=_MORE)
    places = {index: BytesPlace(*_of(info)) for index, info in metadata.storage_data.items()}
    listing = Listing({}, {index.fqn: place for index, place in places.items() if index.offset is None})
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            rectangles = tuple(
                Rectangle(tuple(chunk.offsets), tuple(chunk.sizes), places[MetadataIndex(name, chunk.offsets)])
                for chunk in stored.chunks
            )
            listing.tensors[name] = ListedTensor(tuple(stored.size), stored.properties.dtype, rectangles)
    return listing


def _of(info: _StorageInfo) -> tuple[str, int, int]:
    return info.relative_path, info.offset, info.length


def write_listing(folder: Path, tensors: Mapping[str, ListedTensor], objects: Mapping[str, BytesPlace]) -> None:
    """Write `.metadata` as torch does."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, (shape, dtype, rectangles) in tensors.items():
        chunks = []
        for offsets, sizes, (file, start, length) in rectangles:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, torch.Size(offsets))] = _StorageInfo(file, start, length)
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
    for name, (file, start, length) in objects.items():
        entries[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo(file, start, length)
    metadata = Metadata(entries, storage_data=places, storage_meta=StorageMeta())
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
