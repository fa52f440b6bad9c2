"""Reader and writer of .safetensors files and folders of them, one tensor in memory at a time.

    8 bytes    length n of the header, little endian
    n bytes    header in JSON: name -> dtype, shape, data_offsets [begin, end) counted from the end of the header
    the rest   elements of all tensors, little endian, without gaps

A folder has one file, model.safetensors, or several files and an index that says which tensor is in which. Every number
of a header is checked against the file before it is used, so a damaged or hostile file leads to no large allocation
and to no read outside of it.
"""

import json
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.core.files import ordinary
from megatronish.formats import stored_names
from megatronish.formats.weights import LazyTensor

FILE, INDEX = stored_names.FILE, stored_names.INDEX
MOST_TENSORS = 250_000  # in a file; the largest public models have 100,000 in all of theirs
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


class _TensorLocation(NamedTuple):
    """Location of a tensor: its elements begin at byte `start` of `file`."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        return self.rows(0, self.shape[0]) if self.shape else self.rows(0, 1).squeeze(0)

    def rows(self, start: int, stop: int) -> Tensor:
        tensor = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        with self.file.open("rb") as stream:
            stream.seek(self.start + start * row)
            if stream.readinto(_bytes_of(tensor)) != tensor.nbytes:
                raise _damaged(self.file, "it was cut short while it was read")
        return tensor


def read_folder(folder: Path) -> dict[str, LazyTensor]:
    """Lazy tensors of a folder, by name; UserError for a file that is missing or damaged."""
    index = folder / INDEX
    if not index.is_file():
        return read_file(folder / FILE)
    places = _read_index(index)
    tensors: dict[str, LazyTensor] = {}
    for name in dict.fromkeys(places.values()):
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{index} names the file {name}, which is not in that folder; fetch it again, whole")
        of_file = read_file(folder / name)
        # Index and headers must agree, or a tensor would be left out, or one of two taken, without a word.
        if astray := next((tensor for tensor in of_file if places.get(tensor) != name), None):
            said = f"says it is in {places[astray]}" if astray in places else "does not name it"
            raise UserError(f"{folder / name} holds {astray}, and {INDEX} {said}; fetch the folder again, whole")
        tensors |= of_file
    if absent := [name for name in places if name not in tensors]:
        raise UserError(f"{index} says that {places[absent[0]]} holds {absent[0]}, and it does not; fetch both again")
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    try:
        places = json.loads(ordinary(path).read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) for file in places.values()):
            raise ValueError("a file's name is no text")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"it is no index of tensors ({error})") from error
    return places


def read_file(path: Path) -> dict[str, LazyTensor]:
    """Lazy tensors of one file, by name; UserError if it is missing or damaged."""
    try:
        size = ordinary(path).stat().st_size
        with path.open("rb") as stream:
            header, start = _read_header(path, stream, size)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; correct the path, or fetch it again") from error
    # Each entry by itself: known dtype, whole numbers, as many bytes as its shape has.
    tensors: dict[str, LazyTensor] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if name != "__metadata__":
            dtype, shape, span = _checked(path, name, entry)
            place = _TensorLocation(path, start + span[0], shape, dtype)
            tensors[name] = LazyTensor(shape, dtype, place.read, place.rows if len(shape) > 2 else None)
            spans.append(span)
    # All entries together: the spans [begin, end) tile the bytes after the header, [0, size - start), without gap or
    # overlap, which also means that none ends beyond the file.
    spans.sort()
    if any(end != begin for (_, end), (begin, _) in pairwise([(0, 0), *spans, (size - start, 0)])):
        raise _damaged(path, f"its header describes other than the {size - start} bytes of tensors that follow it")
    return tensors


def _read_header(path: Path, stream: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Header of a file of `size` bytes, and the offset at which the tensors begin."""
    # The length is checked before so many bytes are read: a damaged one may be as large as 2^64.
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, stored_names.MAX_HEADER_BYTES):
        raise _damaged(path, f"its {size} bytes are too few for its header of {length}")
    try:
        header = json.loads(stream.read(length), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    if len(header) > MOST_TENSORS:
        raise _damaged(path, f"it names {len(header):,} tensors, and no model has more than {MOST_TENSORS:,} in a file")
    return header, 8 + length


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name is there twice")
    return entries


def _checked(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    """dtype, shape and span [begin, end) of a header's entry, checked against each other; UserError if they differ."""
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        valid = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise _damaged(path, f"what its header says of {name} is no tensor")
    if dtype not in DTYPES:
        raise UserError(f"{path}: {name} is of type {dtype}, which is not known; known are {', '.join(DTYPES)}")
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise _damaged(path, f"{name} is {dtype} {list(shape)} there, which are not {end - start} bytes")
    return DTYPES[dtype], shape, (start, end)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged: {why}; fetch it again")


def write_folder(folder: Path, tensors: Mapping[str, LazyTensor], *, max_shard_bytes: int) -> None:
    """Write `tensors` into files of at most `max_shard_bytes`, one tensor in memory at a time.

    A tensor is never cut: one that is larger has a file of its own. Several files get an index.
    """
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
    """Write one file, its header first. Tensors of wider dtypes come first, so every tensor begins at its alignment."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    with path.open("wb") as stream:
        stream.write(_header(ordered))
        for name, lazy in ordered:
            tensor = lazy.read().contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (lazy.shape, lazy.dtype), (
                f"{name} is not what its header said"
            )
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
    """Number of bytes of a tensor's elements."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _bytes_of(tensor: Tensor) -> memoryview:
    """Memory of a contiguous tensor, shared with it."""
    return tensor.view(-1).view(torch.uint8).numpy().data
