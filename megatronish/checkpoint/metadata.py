"""What does a checkpoint say it holds, and can it be trusted?

torch keeps this in `.metadata`, a pickle, and a pickle can call anything when it is read. So nothing of it is called
here: what it names becomes plain records, whatever is not one of the few classes that torch writes is refused, and
torch's own objects are then built from numbers, names and shapes that have been looked at. A file is named by a bare
name. So a checkpoint from elsewhere runs no code and reads no file but its own.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

METADATA = ".metadata"
RECORDS = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
}
# What stands for functions and for classes whose objects are made by a call. Builtins, which a pickle cannot change.
PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): int,
}


class _PlainRecord:
    """An object of the pickle: what is said of it, in a class of no other meaning than its name."""

    said: Any = None

    def __setstate__(self, said: Any) -> None:
        self.said = said


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[str, type[_PlainRecord]] = {}  # made anew each time, as a pickle can change a class

    def find_class(self, module: str, name: str) -> Any:
        if name in RECORDS.get(module, ()):
            return self._kinds.setdefault(name, type(name, (_PlainRecord,), {}))
        if (module, name) in PLAIN:
            return PLAIN[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if name == "PosixPath" and module.split(".")[0] == "pathlib":  # Python 3.13 has it in pathlib._local
            return lambda *_: None  # where it was written is of no interest
        raise pickle.UnpicklingError(f"it names {module}.{name}, which torch does not write there")


def parse_metadata(data: bytes) -> Metadata:
    """The content of `.metadata`. Some exception, with a sentence or not, if it is not what torch writes there."""
    said = _said(_MetadataUnpickler(data).load(), "Metadata")
    tensors = {_checked(name, str): _tensor(stored) for name, stored in said["state_dict_metadata"].items()}
    places = dict(_place(index, stored) for index, stored in said["storage_data"].items())
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if MetadataIndex(name, chunk.offsets) not in places:
                raise ValueError(f"it does not say where {name} lies")
    return Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta())


def _tensor(stored: Any) -> TensorStorageMetadata:
    said = _said(stored, "TensorStorageMetadata")
    dtype = _checked(_said(said["properties"], "TensorProperties", tuple)[0], torch.dtype)
    shape = _size(said["size"])
    chunks = []
    for chunk in _checked(said["chunks"], list):
        place = _said(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(place["offsets"]), _size(place["sizes"])
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a rectangle at {list(offsets)} of {list(sizes)} is not inside {list(shape)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    _refuse_overlap(chunks)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)


def _refuse_overlap(chunks: list[ChunkStorageMetadata]) -> None:
    """ValueError if two rectangles share an element: whoever counts elements could not tell that all are there."""
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if len(filled) < 2:
        return
    if not filled[0].sizes:
        raise ValueError("one number is there twice")
    # A sweep along the dimension that is cut most often: few rectangles are under it at a time.
    dim = max(range(len(filled[0].sizes)), key=lambda dim: len({chunk.offsets[dim] for chunk in filled}))
    under: list[ChunkStorageMetadata] = []
    for chunk in sorted(filled, key=lambda chunk: chunk.offsets[dim]):
        under = [other for other in under if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        if any(_overlap(chunk, other) for other in under):
            raise ValueError(f"two rectangles of one tensor overlap at {list(chunk.offsets)}")
        under.append(chunk)


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    edges = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + length and b < a + width for a, width, b, length in edges)


def _place(index: Any, stored: Any) -> tuple[MetadataIndex, _StorageInfo]:
    key, place = _said(index, "MetadataIndex"), _said(stored, "_StorageInfo")
    name = _checked(place["relative_path"], str)
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ValueError(f"it names a file in another folder, {name}")
    if place.get("transform_descriptors"):
        raise ValueError(f"{name} is transformed, which is not done here")
    offset, length = _size((place["offset"], place["length"]))
    return MetadataIndex(_checked(key["fqn"], str), _size(key["offset"])), _StorageInfo(name, offset, length)


def _said(found: Any, kind: str, form: type = dict) -> Any:
    """What is said of a record of this kind."""
    if not isinstance(found, _PlainRecord) or type(found).__name__ != kind:
        raise ValueError(f"it has {_kind(found)} where {kind} belongs")
    return _checked(found.said, form)


def _checked(found: Any, form: type) -> Any:
    if type(found) is not form:
        raise ValueError(f"it has {_kind(found)} where {form.__name__} belongs")
    return found


def _size(found: Any) -> torch.Size:
    """A shape, or a place in one."""
    if type(found) is not tuple or not all(type(size) is int and 0 <= size <= 2**62 for size in found):
        raise ValueError("it has something else where a shape belongs")
    return torch.Size(found)


def _kind(found: Any) -> str:
    return type(found).__name__
