"""Tests of the torch.save format: what is read, what is rejected, and that torch reads what is written."""

import argparse
import io
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT
from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.formats.torch_file import unpickler as torch_pickle
from megatronish.formats.torch_file.archive import TorchFile, TorchFileWriter, memory_of
from megatronish.formats.torch_file.unpickler import Arguments, Inert
from megatronish.formats.weights import LazyTensor

REPOSITORY = ROOT


def lazy(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def read_all(path: Path) -> dict[str, Tensor]:
    file = TorchFile(path)
    return {name: file.tensor(stored).read() for name, stored in file.content.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bytes(memory_of(found[name])) == bytes(memory_of(tensor)), name


def test_tensors_of_every_kind_are_read(tmp_path: Path) -> None:
    numbers = torch.arange(60.0).view(3, 4, 5)
    dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8)
    tensors = {str(dtype): numbers.to(dtype) for dtype in (*dtypes, torch.uint8, torch.bool)}
    tensors |= {str(dtype): numbers.to(dtype) for dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint32)}
    tensors |= {"none": torch.empty(0, 3), "scalar": torch.tensor([7.0])}
    torch.save(tensors | {"parameter": torch.nn.Parameter(numbers)}, tmp_path / "a.pt")
    assert_same(read_all(tmp_path / "a.pt"), tensors | {"parameter": numbers})


def test_views_of_one_storage_are_read(tmp_path: Path) -> None:
    flat = torch.arange(100.0)
    square = flat.view(10, 10)
    tensors = {
        "tied": square,
        "also tied": square,
        "transposed": square[2:5].t(),
        "column": square[:, 3],
        "apart": square[1::3, ::4],
        "expanded": flat[5:6].expand(4, 3),
        "rows": square[7:9],
    }
    torch.save(tensors, tmp_path / "a.pt")
    assert_same(read_all(tmp_path / "a.pt"), tensors)


def test_what_stands_among_arguments_is_read(tmp_path: Path) -> None:
    plain = {"set": {1, 2}, "complex": 1j, "none": None, "text": "a", "list": [1.5, True], "pair": (1, torch.float16)}
    others = {
        "signal": signal.SIGTERM,
        "path": tmp_path,
        "bytes": b"\xff",
        "array": np.arange(3),
        "number": np.float64(3),
        "device": torch.device("cpu"),
        "slice": slice(1, 2),
        "stream": io.BytesIO(b"state"),
        "state": np.random.default_rng().bit_generator.state,
    }
    torch.save({"args": argparse.Namespace(**plain, **others), "size": torch.Size([2, 3])}, tmp_path / "a.pt")
    found = TorchFile(tmp_path / "a.pt").content
    values = found["args"].values
    assert {name: values[name] for name in plain} == plain and found["size"] == (2, 3)
    assert values.keys() == plain.keys() | others.keys() and isinstance(values["array"], Inert)


def test_a_tensor_is_the_callers_own(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    file = TorchFile(tmp_path / "a.pt")
    file.tensor(file.content["a"]).read().zero_()
    assert file.tensor(file.content["a"]).read().eq(1).all()


@pytest.mark.parametrize("how", [{"weights_only": True}, {"weights_only": False}, {"weights_only": True, "mmap": True}])
def test_torch_loads_what_is_written(tmp_path: Path, how: Any) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 2),
        "transposed": torch.randn(6, 3).t(),
    }
    content = {
        "args": argparse.Namespace(size=3, dtype=torch.bfloat16, window=(1, 0), nothing=None),
        "model": OrderedDict((name, lazy(tensor)) for name, tensor in tensors.items()),
        "version": 3.0,
    }
    with TorchFileWriter(tmp_path / "a.pt", content) as writer:
        for tensor in tensors.values():
            writer.add([tensor])
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(tmp_path / "a.pt", **how)
    assert (found["args"], found["version"]) == (content["args"], 3.0)
    assert found["model"].keys() == tensors.keys() and all(
        torch.equal(found["model"][n], t) for n, t in tensors.items()
    )
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found["model"].values() if tensor.numel())
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
    own = TorchFile(tmp_path / "a.pt")
    assert own.content["args"].values == vars(content["args"])
    assert_same({n: own.tensor(s).read() for n, s in own.content["model"].items()}, found["model"])


def test_rows_that_follow_each_other_are_one_tensor(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    with TorchFileWriter(tmp_path / "a.pt", {"a": lazy(whole)}) as writer:
        writer.add([whole[:1], whole[1:3], whole[3:]])
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"], whole)


# Damage.


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    values = torch.randn(1000)
    torch.save({"a": values}, path)
    whole = path.read_bytes()
    flip(path, whole.index(values.numpy().tobytes()) + 77)
    with pytest.raises(UserError, match=r"a.pt is damaged: the bytes of its record data/0 do not match their checksum"):
        read_all(path)
    path.write_bytes(whole)
    flip(path, whole.index(b"_rebuild_tensor_v2"))
    with pytest.raises(UserError, match=r"damaged: the bytes of its record data.pkl do not match"):
        TorchFile(path)
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"a.pt is (damaged: it is no whole zip archive|no zip archive)"):
            TorchFile(path)
    path.unlink()
    with pytest.raises(UserError, match="pt cannot be read: No such file or directory"):
        TorchFile(path)


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(read_all(tmp_path / "a.pt"), {"a": torch.ones(3)})


def test_the_format_of_old_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"no zip archive, as torch.save writes since torch 1.6; .* save it again"):
        TorchFile(tmp_path / "a.pt")


def write_archive(
    path: Path,
    data: bytes,
    *,
    compression: int = zipfile.ZIP_STORED,
    byteorder: bytes = b"little",
    storage: bytes = b"",
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/byteorder", byteorder)
        archive.writestr("a/data/0", storage)
    return path


def test_other_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_archive(path, pickle.dumps({}, 2), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="is compressed"):
        TorchFile(path)
    write_archive(path, pickle.dumps({}, 2), byteorder=b"big")
    with pytest.raises(UserError, match="big-endian"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/constants.pkl", b"")
    with pytest.raises(UserError, match=r"lacks the record data.pkl"):
        TorchFile(path)


# Hostile files. GLOBAL is `c`, a mark `(`, a tuple `t`, REDUCE `R`, BUILD `b`, NEWOBJ \x81, a persistent id `Q`.


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (os.system, ("touch {}",), "posix.system"),
        (eval, ("open('{}', 'w')",), "builtins.eval"),
        (exec, ("open('{}', 'w')",), r"builtins\.exec"),
        (open, ("{}", "w"), "(_?io|builtins).open"),
        (subprocess.check_call, (["touch", "{}"],), "(subprocess|commands).check_call"),
        (torch.load, ("{}",), "torch.serialization.load"),
        (torch.hub.load, ("{}", "model"), "torch.hub.load"),
        (__import__, ("antigravity",), "builtins.__import__"),
        (type, ("Class", (), {}), "builtins.type"),
        (print, ("hello",), "builtins.print"),
    ],
)
def test_a_file_that_would_run_code_is_refused(
    tmp_path: Path, function: Callable[..., Any], args: tuple[Any, ...], name: str
) -> None:
    done = tmp_path / "done"
    told = tuple([part.format(done) for part in a] if isinstance(a, list) else str(a).format(done) for a in args)
    torch.save({"args": argparse.Namespace(size=Calls(function, *told)), "model": {}}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=f"a.pt is refused: it names {name}, .*; nothing of it was run"):
        TorchFile(tmp_path / "a.pt")
    assert not done.exists()


def content_of(tmp_path: Path, data: bytes) -> Any:
    return TorchFile(write_archive(tmp_path / "a.pt", data)).content


def test_packages_that_are_not_looked_into_run_nothing(tmp_path: Path) -> None:
    found = content_of(tmp_path, b"cmegatron.core.os\nsystem\n(S'touch done'\ntR.")
    assert isinstance(found, Inert)
    # numpy is installed, and has functions that call what they are given.
    found = content_of(tmp_path, b"cnumpy\napply_along_axis\n(cnumpy\nsave\nI0\nI0\ntR.")
    assert isinstance(found, Inert)
    found = content_of(tmp_path, b"\x80\x04\x8c\x05numpy\x8c\x0dos.path.isdir\x93)R.")
    assert isinstance(found, Inert)
    # getattr of a stand-in is a stand-in; there is nothing else to have attributes of.
    assert isinstance(content_of(tmp_path, b"c__builtin__\ngetattr\n(cmegatron\nx\nS'__class__'\ntR."), Inert)
    with pytest.raises(UserError, match=r"names builtins\.object"):
        content_of(tmp_path, b"c__builtin__\ngetattr\n(c__builtin__\nobject\nS'__subclasses__'\ntR.")


@pytest.mark.parametrize(
    "data",
    [
        # state of what a name stands for: a function's, a class's, by dict and by slots
        b"ctorch._utils\n_rebuild_tensor_v2\n}S'function'\ncmegatron\nx\nsb.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'__class__'\ncmegatron\nx\nstb.",
        b"cargparse\nNamespace\n(N}S'__init__'\ncmegatron\nx\nstb.",
        b"cargparse\nNamespace\n}S'__init__'\ncmegatron\nx\nsb.",
        b"cmegatron\nx\n(N}S'__new__'\ncmegatron\ny\nstb.",
        b"ccollections\nOrderedDict\n(N}S'__init__'\ncmegatron\nx\nstb.",
        b"ccollections\nOrderedDict\n}S'__init__'\ncmegatron\nx\nsb.",
        b"ctorch\nfloat32\n(N}S'itemsize'\nI1\nstb.",
        b"ctorch\nFloatStorage\n}S'dtype'\nI1\nsb.",
        # state of an object of ours
        b"\x80\x02(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI1\ntQ}S'key'\nS'1'\nsb.",
        # arguments with other than names
        b"\x80\x02cargparse\nNamespace\n)\x81}I1\nI2\nsb.",
        b"\x80\x02cargparse\nNamespace\n)\x81(N}S'__class__'\ncmegatron\nx\nstb.",
        # tensors of nothing
        b"ctorch._utils\n_rebuild_tensor_v2\n(I1\nI0\n(I1\nt(I1\ntI00\n}tR.",
        b"ctorch._utils\n_rebuild_tensor_v3\n(I1\nI0\n(I1\nt(I1\ntI00\n}ctorch\nfloat32\ntR.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cargparse\nNamespace\ncmegatron\nx\n)}tR.",
        # storages that are none
        b"\x80\x02(S'storage'\ncmegatron\nx\nS'0'\nS'cpu'\nI1\ntQ.",
        b"\x80\x02(S'module'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI1\ntQ.",
        b"\x80\x02(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI-1\ntQ.",
        b"\x80\x02I1\nQ.",
        # registered elsewhere, called without arguments, unfinished, out of order
        b"\x80\x02\x82\x01.",
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"ctorch.Size\n",
        b"R.",
        b"",
    ],
)
def test_a_pickle_changes_nothing_and_makes_nothing_up(tmp_path: Path, data: bytes) -> None:
    before = {name: id(value) for name, value in torch_pickle.ALLOWED.items()}
    attributes = [set(dir(value)) for value in torch_pickle.ALLOWED.values()]
    with pytest.raises(UserError, match=r"is (refused|damaged)"):
        content_of(tmp_path, data)
    assert {name: id(value) for name, value in torch_pickle.ALLOWED.items()} == before
    assert [set(dir(value)) for value in torch_pickle.ALLOWED.values()] == attributes
    torch.save({"a": torch.ones(2), "b": argparse.Namespace(c=1)}, tmp_path / "b.pt")
    file = TorchFile(tmp_path / "b.pt")
    assert file.tensor(file.content["a"]).read().eq(1).all() and isinstance(file.content["b"], Arguments)


def spelled(key: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """The pickle of a tensor of 4 floats in storage 0, as somebody might spell it."""

    def tuple_of(numbers: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"I%d\n" % number for number in numbers) + b"t"

    storage = b"(S'storage'\nctorch\nFloatStorage\nS'%s'\nS'cpu'\nI4\ntQ" % key.encode()
    place = b"I%d\n" % offset + tuple_of(shape) + tuple_of(strides)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + place + b"I00\n}tR."


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        (("0", 1, (4,), (1,)), "a tensor ends at byte 20 of the record data/0, which has 16"),
        (("0", 0, (2, 2), (10**12, 1)), "a tensor ends at byte 4000000000008 of"),
        (("0", -1, (2,), (1,)), "the shape of a tensor, its strides or its offset are no whole numbers"),
        (("0", 0, (-2,), (1,)), "the shape of a tensor, its strides or its offset are no whole numbers"),
        (("0", 0, (2,), (-1,)), "the shape of a tensor, its strides or its offset are no whole numbers"),
        (("0", 0, (2, 2), (1,)), "a tensor has no shape, or not a stride for each dimension"),
        (("1", 0, (2,), (1,)), "it lacks the record data/1"),
        (("../../secret", 0, (2,), (1,)), "it lacks the record data/../../secret"),
    ],
)
def test_a_tensor_that_is_not_in_the_file_is_refused(tmp_path: Path, spelling: Any, message: str) -> None:
    file = TorchFile(write_archive(tmp_path / "a.pt", spelled(*spelling), storage=bytes(16)))
    with pytest.raises(UserError, match=f"is damaged: {message}"):
        file.tensor(file.content)


# Memory.

LARGE_MODEL = """
import resource, sys
from pathlib import Path
import torch
from megatronish.formats.megatron import read as megatron
from megatronish.formats.weights import Description, LazyTensor, Model, from_ours, to_ours
from megatronish.config.sections.model import ModelConfig

def lazy(number, shape):
    return LazyTensor(shape, torch.float32, lambda: torch.full(shape, float(number)))

def convert(folder, num_layers, hidden_size, vocab_size):
    config = ModelConfig(
        num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=8, make_vocab_size_divisible_by=2
    )
    description = Description(config, vocab_size=vocab_size, seq_length=128)
    rules = megatron.rules(description)
    shapes = {name: sharding.shape for name, sharding in description.shardings().items()}
    ours = {name: lazy(number, shape) for number, (name, shape) in enumerate(shapes.items())}
    megatron.write(folder / "a", Model(description, from_ours(ours, rules).tensors), tensor_parallel_size=2)
    found = to_ours(megatron.read(folder / "a").tensors, rules).tensors
    megatron.write(folder / "b", Model(description, from_ours(found, rules).tensors), pipeline_parallel_size=num_layers)
    for number, tensor in enumerate(to_ours(megatron.read(folder / "b").tensors, rules).tensors.values()):
        assert tensor.read().eq(number).all()

folder = Path(sys.argv[1])
convert(folder / "small", 2, 16, 11)  # what is loaded when first used
status = (folder.joinpath("/proc/self/status")).read_text().splitlines()
data = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
limit = data + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
convert(folder / "large", 19, 512, 32001)  # an embedding of 65.5 MB, 305 MB in all
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits memory on Linux alone")
def test_a_model_of_three_times_the_memory_is_converted(tmp_path: Path) -> None:
    largest = 32002 * 512 * 4
    command = [sys.executable, "-c", LARGE_MODEL, str(tmp_path), str(int(1.6 * largest))]
    # Freed memory is given back at once, so that the limit counts what is held, not what glibc keeps (up to 64 MB).
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "100000"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
