"""How are tensors read from .safetensors files and written to them, one at a time?

A file is 8 bytes with the length of a header, the header in JSON (name -> dtype, shape, place among the bytes that
follow), and the bytes, little-endian, without a gap. A folder has one file, model.safetensors, or several and an
index that says which tensor is in which. Every number of a header is checked against the file before it is used.
"""

import json
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from megatronish.errors import UserError
from megatronish.formats.weights import LazyTensor

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # what the format's own library allows
ALIGNMENT = 8

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Place(NamedTuple):
    """Where a tensor lies in a file."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            if stream.readinto(_bytes_of(tensor)) != tensor.nbytes:
                raise _damaged(self.file, "it was cut short while it was read")
        return tensor


def read_folder(folder: Path) -> dict[str, LazyTensor]:
    """The tensors of a folder; UserError for a file that is missing or damaged."""
    index = folder / INDEX
    if not index.is_file():
        return read_file(folder / FILE)
    places = _read_index(index)
    found: dict[str, LazyTensor] = {}
    for name in dict.fromkeys(places.values()):
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{index} names the file {name}, which is not in that folder; fetch it again, whole")
        tensors = read_file(folder / name)
        found |= {tensor: lazy for tensor, lazy in tensors.items() if places.get(tensor) == name}
    if absent := [name for name in places if name not in found]:
        raise UserError(f"{index} says that {places[absent[0]]} holds {absent[0]}, and it does not; fetch both again")
    return found


def _read_index(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) for file in places.values()):
            raise ValueError("a file's name is no text")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"it is no index of tensors ({error})") from error
    return places


def read_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file; UserError if it is missing or damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            header, start = _read_header(path, stream, size)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; correct the path, or fetch it again") from error
    found: dict[str, LazyTensor] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if name != "__metadata__":
            dtype, shape, span = _checked(path, name, entry)
            found[name] = LazyTensor(shape, dtype, _Place(path, start + span[0], shape, dtype).read)
            spans.append(span)
    spans.sort()
    if any(end != begin for (_, end), (begin, _) in pairwise([(0, 0), *spans, (size - start, 0)])):
        raise _damaged(path, f"its header speaks of other than the {size - start} bytes of tensors that follow it")
    return found


def _read_header(path: Path, stream: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise _damaged(path, f"its {size} bytes are too few for the header of {length} that it speaks of")
    try:
        header = json.loads(stream.read(length), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    return header, 8 + length


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _checked(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    """dtype, shape and span of a tensor, as a header has them."""
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise _damaged(path, f"what its header says of {name} is no tensor")
    if dtype not in DTYPES:
        raise UserError(f"{path}: {name} is of type {dtype}, which is not known; known are {', '.join(DTYPES)}")
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise _damaged(path, f"{name} is {dtype} {list(shape)} there, which are not {end - start} bytes")
    return DTYPES[dtype], shape, (start, end)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged: {why}; fetch it again")


def write_folder(folder: Path, tensors: Mapping[str, LazyTensor], *, max_shard_bytes: int) -> None:
    """Write `tensors` into files of at most `max_shard_bytes` (but one tensor is never cut), one tensor at a time."""
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_file(folder / FILE, shards[0])
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard)
        places |= dict.fromkeys(shard, name)
    total = {"total_size": sum(map(nbytes_of, tensors.values()))}
    text = json.dumps({"metadata": total, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")


def _shards(tensors: Mapping[str, LazyTensor], max_bytes: int) -> list[dict[str, LazyTensor]]:
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = nbytes_of(tensor)
        if shards[-1] and size + nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += nbytes
    return shards


def write_file(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write one file, its header first. Wider types come first, so that every tensor begins at its alignment."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    with path.open("wb") as stream:
        stream.write(_header(ordered))
        for name, lazy in ordered:
            tensor = lazy.read().contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (lazy.shape, lazy.dtype), f"{name} is not what it said"
            stream.write(_bytes_of(tensor))
            del tensor  # before the next is read


def _header(tensors: Iterable[tuple[str, LazyTensor]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors:
        end = start + nbytes_of(tensor)
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def nbytes_of(tensor: LazyTensor) -> int:
    """Bytes of its elements."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
