"""Tests of the safetensors format: files interchange with the format's own library, malformed files are rejected."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.formats.safetensors import FILE, INDEX, read_file, read_folder, write_folder
from megatronish.formats.weights import LazyTensor

TENSORS = {
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "matrix": torch.arange(15, dtype=torch.float32).view(3, 5),
    "half": torch.arange(21, dtype=torch.float16).view(7, 3),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
}


def lazy(tensors: dict[str, Tensor]) -> dict[str, LazyTensor]:
    return {name: LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.clone) for name, tensor in tensors.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in read_folder(folder).items()}


def test_the_library_reads_what_is_written_here(tmp_path: Path) -> None:
    write_folder(tmp_path, lazy(TENSORS), max_shard_bytes=10**9)
    assert same(load_file(tmp_path / FILE), TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_what_the_library_writes_is_read_here(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / FILE, metadata={"format": "pt"})
    assert same(read_all(tmp_path), TENSORS)


def test_tensors_lie_at_multiples_of_their_size(tmp_path: Path) -> None:
    write_folder(tmp_path, lazy(TENSORS), max_shard_bytes=10**9)
    data = (tmp_path / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert length % 8 == 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] % TENSORS[name].dtype.itemsize == 0


def test_files_are_not_larger_than_asked_for_and_an_index_finds_what_is_in_them(tmp_path: Path) -> None:
    write_folder(tmp_path, lazy(TENSORS), max_shard_bytes=60)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for file in files:
        found = load_file(tmp_path / file)
        assert sorted(found) == sorted(name for name, place in index["weight_map"].items() if place == file)
        assert sum(tensor.nbytes for tensor in found.values()) <= 60
    assert same(read_all(tmp_path), TENSORS)


def write_raw(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "names twice": (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 1}', "is there twice"),
    "no JSON": (b'{"a"', "is not JSON"),
    "no text": (b"\xff\xff", "is not JSON"),
    "too deep": (b"[" * 100_000, "is not JSON"),
    "no object": ([1], "no JSON object"),
    "no entry": ({"a": 1}, "is no tensor"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, "is no tensor"),
    "shape of text": ({"a": entry(shape="23")}, "is no tensor"),
    "shape of truth": ({"a": entry(shape=[True, 2])}, "is no tensor"),
    "negative shape": ({"a": entry(shape=[-1, -2])}, "is no tensor"),
    "shape of fractions": ({"a": entry(shape=[2.0])}, "is no tensor"),
    "negative place": ({"a": entry(offsets=[-8, 0])}, "is no tensor"),
    "three offsets": ({"a": entry(offsets=[0, 4, 8])}, "is no tensor"),
    "dtype of a list": ({"a": entry(dtype=["F32"])}, "is no tensor"),
    "unknown dtype": ({"a": entry(dtype="F4")}, "a is of type F4, which is not known"),
    "huge": ({"a": entry(shape=[2**62, 2**62])}, "are not 8 bytes"),
    "backwards": ({"a": entry(shape=[0], offsets=[8, 4])}, "are not -4 bytes"),
    "beyond the end": ({"a": entry(shape=[4], offsets=[0, 16])}, "other than the 8 bytes"),
    "overlapping": ({"a": entry(), "b": entry()}, "other than the 8 bytes"),
    "a hole": ({"a": entry(shape=[1], offsets=[4, 8])}, "other than the 8 bytes"),
    "bytes left over": ({"a": entry(shape=[1], offsets=[0, 4])}, "other than the 8 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_and_the_file_is_named(tmp_path: Path, name: str) -> None:
    header, why = HOSTILE[name]
    write_raw(tmp_path / FILE, header, bytes(8))
    with pytest.raises(UserError, match=why) as caught:
        read_folder(tmp_path)
    assert str(tmp_path / FILE) in str(caught.value)


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for length in (0, 5, 8, 100, len(data) - 1):
        (tmp_path / FILE).write_bytes(data[:length])
        with pytest.raises(UserError, match="is damaged"):
            read_file(tmp_path / FILE)


def test_a_file_that_is_cut_after_it_was_looked_at_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / FILE)
    tensors = read_folder(tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-1])
    with pytest.raises(UserError, match="cut short while it was read"):
        tensors["a"].read()


def change_index(**places: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= places
        (folder / INDEX).write_text(json.dumps(index))

    return change


BROKEN = {
    "no JSON": (lambda folder: (folder / INDEX).write_text("{"), "is no index of tensors"),
    "too deep": (lambda folder: (folder / INDEX).write_text("[" * 100_000), "is no index of tensors"),
    "no object": (lambda folder: (folder / INDEX).write_text("[]"), "is no index of tensors"),
    "no names": (change_index(odd=1), "is no index of tensors"),
    "another file": (change_index(odd="../model.safetensors"), "which is not in that folder"),
    "missing file": (lambda folder: next(folder.glob("*-00002-*")).unlink(), "which is not in that folder"),
    "unknown tensor": (change_index(more="model-00001-of-00003.safetensors"), "holds more, and it does not"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_index_is_refused(tmp_path: Path, name: str) -> None:
    change, why = BROKEN[name]
    write_folder(tmp_path, lazy(TENSORS), max_shard_bytes=60)
    change(tmp_path)
    with pytest.raises(UserError, match=why):
        read_folder(tmp_path)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_tensor_that_the_index_does_not_place_there_is_refused(tmp_path: Path, is_named: bool) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"c": torch.zeros(2)} | ({"b": torch.ones(2)} if is_named else {}), tmp_path / "2.safetensors")
    places = {"a": "1.safetensors", "c": "2.safetensors"} | ({"b": "2.safetensors"} if is_named else {})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    said = "says it is in 2.safetensors" if is_named else "does not name it"
    with pytest.raises(UserError, match=rf"1\.safetensors holds b, and {INDEX} {said}; fetch the folder again, whole"):
        read_folder(tmp_path)
