"""Safe reader of `.metadata`, the pickle in which torch lists the tensors of a checkpoint and their rectangles.

A pickle can call anything when it is read. Here nothing is called: each of the few classes that torch writes becomes a
plain record, every other name is refused, and torch's own objects are then built from numbers, names and shapes that
have been checked. A file is given by a bare name. So a checkpoint from elsewhere runs no code and reads only its own
files.

Three phases: unpickling into plain records (`_MetadataUnpickler`), checks of types and ranges while torch's objects are
built (`_tensor`, `_storage_entry`), and checks across records: the rectangles of a tensor are inside its shape, do not
overlap, and each has its bytes in some file.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

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

from megatronish.core.pickles import SealedCall, exactly, refuse_bombs, shape_of

METADATA = ".metadata"
OBJECT = "BytesStorageMetadata"
RECORDS: Mapping[str, set[str]] = {
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
# Replacements of functions, and of classes whose objects are made by a call, which a pickle cannot change.
PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): SealedCall(shape_of),
    ("torch.serialization", "_get_layout"): exactly(str),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): exactly(int),
}


class _PlainRecord:
    """Object of the pickle: its unchecked state, in a class that has only the name of the object's class."""

    state: Any = None

    def __init__(self, *_arguments: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, more: Mapping[tuple[str, str], str]) -> None:
        super().__init__(io.BytesIO(data))
        self._more = more
        # Classes by name, new ones for each pickle: a pickle can change the attributes of a class.
        self._classes: dict[str, type[_PlainRecord]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in RECORDS.get(module, ()) or (module, name) in self._more:
            name = self._more.get((module, name), name)
            return self._classes.setdefault(name, type(name, (_PlainRecord,), {}))
        if (module, name) in PLAIN:
            return PLAIN[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if name == "PosixPath" and module.split(".")[0] == "pathlib":  # Python 3.13 has it in pathlib._local
            return lambda *_: None  # the path it was written to, which is not used
        raise pickle.UnpicklingError(f"it names {module}.{name}, which torch does not write there")


def parse_metadata(data: bytes, *, more: Mapping[tuple[str, str], str] | None = None) -> Metadata:
    """Content of `.metadata`; raises an exception of any class if it is not what torch writes there.

    `more` are names, (module, name), that a checkpoint of others may have too, with the class of which their records
    are; a record of a class of its own is not looked at. One of class `OBJECT` is an object that is no tensor.
    """
    # Plain records only: no class or function of torch has run yet.
    refuse_bombs(data)
    metadata = _state(_MetadataUnpickler(data, more or {}).load(), "Metadata")
    # name -> shape, dtype and rectangles; (name, offset of a rectangle) -> file, offset and length in bytes.
    entries = {_checked(name, str): record for name, record in metadata["state_dict_metadata"].items()}
    objects = {name: BytesStorageMetadata() for name, record in entries.items() if _is_object(record)}
    tensors = {name: _tensor(record) for name, record in entries.items() if name not in objects}
    places = dict(_storage_entry(index, record) for index, record in metadata["storage_data"].items())
    # Each rectangle needs its bytes. More bytes than rectangles do no harm: nothing asks for them.
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if MetadataIndex(name, chunk.offsets) not in places:
                raise ValueError(f"it does not say where {name} lies")
    return Metadata({**tensors, **objects}, storage_data=places, storage_meta=StorageMeta())


def _is_object(record: Any) -> bool:
    return isinstance(record, _PlainRecord) and type(record).__name__ == OBJECT


def _tensor(record: Any) -> TensorStorageMetadata:
    """Shape, dtype and rectangles of a tensor; ValueError for a rectangle outside the shape or for two that overlap."""
    fields = _state(record, "TensorStorageMetadata")
    dtype = _checked(_state(fields["properties"], "TensorProperties", tuple)[0], torch.dtype)
    shape = _size(fields["size"])
    chunks = []
    for chunk in _checked(fields["chunks"], list):
        rectangle = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(rectangle["offsets"]), _size(rectangle["sizes"])
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a rectangle at {list(offsets)} of {list(sizes)} is not inside {list(shape)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    _refuse_overlap(chunks)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)


def _refuse_overlap(chunks: list[ChunkStorageMetadata]) -> None:
    """ValueError if two rectangles share an element: the count of elements would then not prove that all are there."""
    # An empty rectangle shares nothing, and a tensor without dims, of one number, has one rectangle at most.
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if len(filled) < 2:
        return
    if not filled[0].sizes:
        raise ValueError("one number is there twice")
    # Sweep along the dim that is cut most often. `active` are the rectangles that cross the present offset: few, so a
    # tensor of n rectangles takes far less than n^2 comparisons.
    dim = max(range(len(filled[0].sizes)), key=lambda dim: len({chunk.offsets[dim] for chunk in filled}))
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(filled, key=lambda chunk: chunk.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        if any(_overlap(chunk, other) for other in active):
            raise ValueError(f"two rectangles of one tensor overlap at {list(chunk.offsets)}")
        active.append(chunk)


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    edges = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + length and b < a + width for a, width, b, length in edges)


def _storage_entry(index: Any, record: Any) -> tuple[MetadataIndex, _StorageInfo]:
    """Rectangle (name and offset) with the place of its bytes (file, offset, length); ValueError for a foreign file."""
    key, place = _state(index, "MetadataIndex"), _state(record, "_StorageInfo")
    name = _checked(place["relative_path"], str)
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ValueError(f"it names a file in another folder, {name}")
    if place.get("transform_descriptors"):
        raise ValueError(f"{name} is transformed, which is not done here")
    offset, length = _size((place["offset"], place["length"]))
    offset_in_tensor = key.get("offset")  # objects have none
    where = None if offset_in_tensor is None else _size(offset_in_tensor)
    return MetadataIndex(_checked(key["fqn"], str), where), _StorageInfo(name, offset, length)


def _state(record: Any, class_name: str, form: type = dict) -> Any:
    """State of a record of this class, of type `form`; ValueError for another class or another type of state."""
    if not isinstance(record, _PlainRecord) or type(record).__name__ != class_name:
        raise ValueError(f"it has {type(record).__name__} where {class_name} belongs")
    return _checked(record.state, form)


def _checked(value: Any, form: type) -> Any:
    """The value, if it is of exactly this type; ValueError if not."""
    if type(value) is not form:
        raise ValueError(f"it has {type(value).__name__} where {form.__name__} belongs")
    return value


def _size(value: Any) -> torch.Size:
    """Shape, or offsets in one: a tuple of whole numbers of at most 2^62; ValueError if it is anything else."""
    if type(value) is not tuple or not all(type(size) is int and 0 <= size <= 2**62 for size in value):
        raise ValueError("it has something else where a shape belongs")
    return torch.Size(value)
