"""Tests of untrusted checkpoints: loading runs no code and touches no file outside of the checkpoint."""

import hashlib
import io
import itertools
import json
import math
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from jobs import call_main, tiny, train_on_ranks
from saved_runs import alone, read_whole, save_value, saved_value, sealed
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatronish.checkpoint.checksums import Checksums, DamagedError
from megatronish.checkpoint.folder import read_state, remove_old
from megatronish.checkpoint.metadata import parse_metadata
from megatronish.checkpoint.tensors import read_tensors
from megatronish.core.errors import UserError
from megatronish.train.checkpoint_state import read_run

NAME = "model.weight"
TUPLES_OF_TUPLES = b"\x80\x02})" + b"q\x01h\x01\x86" * 60 + b"K\x01s."


class Call:
    """A pickle that calls `function(*arguments)` when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.called


def pwn(folder: Path) -> Call:
    return Call(os.system, f"touch {folder / 'pwned'}")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tensor of 64 ones."""
    save_value(tmp_path / "checkpoints", 1.0)
    return tmp_path / "checkpoints" / "step_00000004"


def metadata_of(checkpoint: Path) -> Metadata:
    """As torch itself reads it."""
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def forge(checkpoint: Path, metadata: Any = None, *, item: bytes | None = None) -> None:
    """Put something in the place of the metadata, or of the one stored tensor, with sums that fit."""
    if item is not None:
        name = "__0_0.distcp"
        (checkpoint / name).write_bytes(item)
        metadata = metadata_of(checkpoint)
        metadata.storage_data = {
            index: replace(place, length=len(item)) for index, place in metadata.storage_data.items()
        }
    found = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (checkpoint / ".metadata").write_bytes(found)
    Checksums(checkpoint, {}).with_other_files().write()


def refused(checkpoint: Path, told: str) -> None:
    """With a sentence, on every way to the tensors, and nothing was called."""
    value = torch.zeros(64)
    for read in (lambda: read_whole(checkpoint), lambda: read_tensors(checkpoint, {NAME: alone(value)})):
        with pytest.raises(DamagedError, match=told):
            read()
    assert not value.any()
    assert not list(checkpoint.parent.parent.rglob("pwned"))


def test_what_torch_writes_is_read_as_torch_reads_it(checkpoint: Path) -> None:
    mine, torchs = parse_metadata((checkpoint / ".metadata").read_bytes()), metadata_of(checkpoint)
    assert mine.state_dict_metadata == torchs.state_dict_metadata
    assert mine.storage_data == torchs.storage_data
    assert read_whole(checkpoint)[NAME].tolist() == [1.0] * 64
    # And torch reads all of it, with no help of ours.
    value = {NAME: torch.zeros(64)}
    torch.distributed.checkpoint.load(value, checkpoint_id=checkpoint, no_dist=True)
    assert value[NAME].tolist() == [1.0] * 64


def test_metadata_that_call_a_function_are_refused(checkpoint: Path) -> None:
    forge(checkpoint, pwn(checkpoint))
    refused(checkpoint, "it names posix.system, which torch does not write there")
    forge(checkpoint, Metadata({NAME: pwn(checkpoint)}, storage_data={}))
    refused(checkpoint, "it names posix.system")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch", "Tensor"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystem"),
        ("pathlib", "Path.write_text"),
        ("megatronish.checkpoint.metadata", "_Record"),
    ],
)
def test_only_what_torch_writes_there_may_be_named(checkpoint: Path, module: str, name: str) -> None:
    forge(
        checkpoint,
        b"\x80\x04"
        + b"\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(name)])
        + name.encode()
        + b"\x93.",
    )
    refused(checkpoint, f"it names {module}.{name}, which torch does not write there")


def test_metadata_change_no_class(checkpoint: Path) -> None:
    """A pickle may set attributes of whatever it names: of copies made for it alone."""
    for module, name in (("torch.distributed.checkpoint.metadata", "Metadata"), ("pathlib", "PosixPath")):
        forge(checkpoint, f"c{module}\n{name}\n(N}}S'pwned'\nS'yes'\nstb.".encode())
        refused(checkpoint, "cannot be read")
    assert not any(hasattr(kind, "pwned") for kind in (Metadata, PurePosixPath, Path))


def tensor_metadata(**changes: Any) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0]), torch.Size([64]))
    return replace(TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([64]), [whole]), **changes)


WRONG: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a place in another folder": (tensor_metadata, lambda: _StorageInfo("../other", 0, 10)),
    "an absolute place": (tensor_metadata, lambda: _StorageInfo("/etc/passwd", 0, 10)),
    "a negative place": (tensor_metadata, lambda: _StorageInfo("__0_0.distcp", -1, 10)),
    "a place that is no number": (tensor_metadata, lambda: _StorageInfo("__0_0.distcp", "0", 10)),  # type: ignore[arg-type]
    "a transformed tensor": (tensor_metadata, lambda: _StorageInfo("__0_0.distcp", 0, 10, ["zstd"])),
    "a text for a place": (tensor_metadata, lambda: "__0_0.distcp"),
    "bytes for a tensor": (BytesStorageMetadata, lambda: _StorageInfo("__0_0.distcp", 0, 10)),
    "a text for a tensor": (lambda: "tensor", lambda: _StorageInfo("__0_0.distcp", 0, 10)),
    "a text for a shape": (lambda: tensor_metadata(size="64"), lambda: _StorageInfo("__0_0.distcp", 0, 10)),
    "a negative shape": (lambda: tensor_metadata(size=torch.Size([-64])), lambda: _StorageInfo("__0_0.distcp", 0, 10)),
    "a rectangle outside": (
        lambda: tensor_metadata(size=torch.Size([32])),
        lambda: _StorageInfo("__0_0.distcp", 0, 10),
    ),
    "another dtype": (
        lambda: tensor_metadata(properties=TensorProperties("float32")),  # type: ignore[arg-type]
        lambda: _StorageInfo("__0_0.distcp", 0, 10),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_metadata_that_do_not_fit_are_refused(checkpoint: Path, what: str) -> None:
    tensor, place = (make() for make in WRONG[what])
    forge(checkpoint, Metadata({NAME: tensor}, storage_data={MetadataIndex(NAME, torch.Size([0])): place}))
    refused(checkpoint, ".metadata cannot be read")


def test_a_tensor_of_which_nobody_says_where_it_lies_is_refused(checkpoint: Path) -> None:
    forge(checkpoint, Metadata({NAME: tensor_metadata()}, storage_data={}))
    refused(checkpoint, "it does not say where model.weight lies")


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((64,), [((0,), (40,)), ((24,), (24,))]),  # as many elements as it has, and not all of them
        ((4, 4), [((0, 0), (2, 4)), ((1, 2), (2, 2)), ((3, 0), (1, 4))]),
        ((4, 4), [((0, 0), (4, 2)), ((0, 0), (4, 2))]),
        ((), [((), ()), ((), ())]),
    ],
)
def test_rectangles_that_overlap_are_refused(checkpoint: Path, shape: tuple[int, ...], chunks: list[Any]) -> None:
    stored = tensor_metadata(size=torch.Size(shape), chunks=[chunk(*each) for each in chunks])
    place = _StorageInfo("__0_0.distcp", 0, 10)
    places = {MetadataIndex(NAME, torch.Size(offsets)): place for offsets, _ in chunks}
    with pytest.raises(ValueError, match=r"two rectangles of one tensor overlap|one number is there twice"):
        parse_metadata(pickle.dumps(Metadata({NAME: stored}, storage_data=places)))
    forge(checkpoint, Metadata({NAME: stored}, storage_data=places))
    with pytest.raises(DamagedError, match=r"\.metadata cannot be read"):
        read_whole(checkpoint)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(2048,), (1, 2048), (32, 64)])
def test_thousands_of_rectangles_side_by_side_are_one_tensor(shape: tuple[int, ...]) -> None:
    chunks = [chunk(offsets, (1,) * len(shape)) for offsets in itertools.product(*map(range, shape))]
    chunks.append(chunk((0,) * len(shape), (0,) * len(shape)))  # of a rank that holds nothing
    stored = tensor_metadata(size=torch.Size(shape), chunks=chunks)
    place = _StorageInfo("__0_0.distcp", 0, 10)
    found = Metadata({NAME: stored}, storage_data={MetadataIndex(NAME, each.offsets): place for each in chunks})
    assert parse_metadata(pickle.dumps(found)).state_dict_metadata == {NAME: stored}


def test_a_tensor_that_is_not_whole_is_refused(checkpoint: Path) -> None:
    stored = tensor_metadata(size=torch.Size([65]))
    place = metadata_of(checkpoint).storage_data
    forge(checkpoint, Metadata({NAME: stored}, storage_data=place))
    with pytest.raises(UserError, match=f"{NAME} is not whole in the checkpoint: 64 of 65 elements are there"):
        read_whole(checkpoint)


def test_a_place_that_nobody_summed_is_not_read(checkpoint: Path) -> None:
    """Not even inside a file that is all right."""
    for place in (_StorageInfo("__0_0.distcp", 1, 10), _StorageInfo("other", 0, 10), _StorageInfo("state.json", 0, 1)):
        forge(
            checkpoint, Metadata({NAME: tensor_metadata()}, storage_data={MetadataIndex(NAME, torch.Size([0])): place})
        )
        refused(checkpoint, r"checksums\.json does not know")


def saved(found: Any) -> bytes:
    """As torch.save writes it."""
    stream = io.BytesIO()
    torch.save(found, stream)
    return stream.getvalue()


def packed(data: bytes, *, compression: int = zipfile.ZIP_STORED, decoy: str | None = None) -> bytes:
    """A file of torch.save with this pickle, and with a harmless one under the name `decoy`."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("archive/version", b"3\n")
        if decoy is not None:
            archive.writestr(decoy, pickle.dumps([1] * 100))
        for name, record in {"data.pkl": data, "byteorder": b"little"}.items():
            archive.writestr(f"archive/{name}", record)
    return stream.getvalue()


def test_metadata_that_would_end_the_process_are_refused(checkpoint: Path) -> None:
    sealed(checkpoint, lambda folder: (folder / ".metadata").write_bytes(TUPLES_OF_TUPLES))
    refused(checkpoint, r"\.metadata cannot be read \(it has tuples inside of tuples")


def test_a_stored_tensor_that_calls_a_function_is_refused(checkpoint: Path) -> None:
    told = "what __0_0.distcp holds of model.weight is no tensor"
    for item in (
        pickle.dumps(pwn(checkpoint)),
        saved(pwn(checkpoint)),
        saved([torch.ones(64), pwn(checkpoint)]),
        saved(torch.nn.Linear(2, 2)),
        saved({"weight": torch.ones(64)}),
        saved(torch.ones(63)),
        saved(torch.ones(64, dtype=torch.float64)),
        saved(torch.ones(64, device="meta")),
        saved(torch.ones(64).to_sparse()),
        saved(torch.nested.nested_tensor([torch.ones(64)])),
        b"\0" * 100,
        b"x",
        packed(TUPLES_OF_TUPLES),
        packed(TUPLES_OF_TUPLES, decoy="other/data.pkl"),
        packed(TUPLES_OF_TUPLES, decoy="archive/DATA.pkl"),
        packed(b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s."),
        packed(pickle.dumps([1] * 100), compression=zipfile.ZIP_DEFLATED),
    ):
        forge(checkpoint, item=item)
        refused(checkpoint, told)
    forge(checkpoint, item=saved(torch.full((64,), 7.0)))
    assert read_whole(checkpoint)[NAME].tolist() == [7.0] * 64  # the forger can forge


STATES = {
    "a list": "[]",
    "a text": '"state"',
    "nothing": "",
    "too deep": "[" * 100_000,
    "no number": '{"step": ',
    "no config": '{"step": 1, "config": []}',
    "no section": '{"step": 1, "config": {"model": "../../etc/passwd"}}',
    "no copies": '{"step": 1, "copies": {"data.tokenizer_model": 3}}',
    "no vocabulary": '{"step": 1, "vocab_size": "x"}',
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_that_is_none_of_ours_is_refused(checkpoint: Path, what: str) -> None:
    sealed(checkpoint, lambda folder: (folder / "state.json").write_text(STATES[what]))
    with pytest.raises(DamagedError, match=r"state\.json (cannot be read|is not one of ours)"):
        read_state(checkpoint)


@pytest.mark.parametrize(
    "files",
    [
        {"../outside": [[1, "0"]]},
        {"/etc/hostname": [[1, "0"]]},
        {"state.json": [[-1, "0"]]},
        {"state.json": [["1", "0"]]},
        {"state.json": [[1, "0", 2]]},
        {"state.json": 1},
        {"a\0b": [[1, "0"]]},
        {"\ud800": [[1, "0"]]},
        [],
    ],
)
def test_sums_that_are_none_of_ours_are_refused(checkpoint: Path, files: Any) -> None:
    body = json.dumps(files)
    text = f'{{"files": {body}, "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'
    (checkpoint / "checksums.json").write_text(text)
    with pytest.raises(DamagedError, match=r"checksums\.json does not hold what was written"):
        Checksums.read(checkpoint)


# What a run says of it


def test_a_run_refuses_what_is_no_checkpoint_of_a_run(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path / "run", "--train-iters 1"))
    source = tmp_path / "run" / "checkpoints" / "step_00000001"
    state = json.loads((source / "state.json").read_text())
    forgeries: dict[str, Callable[[Path], object]] = {
        "state.json lacks config, vocab_size": lambda folder: (folder / "state.json").write_text("{}"),
        "state.json is not that of a run": lambda folder: (folder / "state.json").write_text(
            json.dumps(state | {"consumed_samples": "1"})
        ),
        "state.json is not one of ours: what it says of step": lambda folder: (folder / "state.json").write_text(
            json.dumps(state | {"step": "1"})
        ),
        ".metadata cannot be read (it names posix.system": lambda folder: (folder / ".metadata").write_bytes(
            pickle.dumps(pwn(tmp_path))
        ),
    }
    for told, change in forgeries.items():
        run_dir = tmp_path / "forged"
        shutil.copytree(tmp_path / "run", run_dir)
        sealed(run_dir / "checkpoints" / source.name, change)
        ended = call_main(tiny(run_dir, "--train-iters 2"))
        assert ended.status == 2 and told.strip() in ended.errors and "remove that folder" in ended.errors, ended
        shutil.rmtree(run_dir)
    assert not (tmp_path / "pwned").exists()
    for change in (
        {"config": {"model": []}},
        {"config": {}},
        {"config": state["config"] | {"training": {}}},
        {"step": 10**30},
        {"consumed_samples": 10**30},
        {"consumed_samples": -1},
        {"islands": 0},
        {"islands": "2"},
        {"optimizer_steps": True},
        {"skipped_steps": "x"},
        {"skipped_samples": 0.5},
        {"loss_scale": "x"},
        {"loss_scale": {"scale": 1.0}},
        {"loss_scale": {"scale": math.nan, "growth_tracker": 0, "hysteresis_tracker": 2}},
        {"origin": "x"},
        {"hooks": ["log"]},
        {"hooks": {"log": 3}},
    ):
        forged = json.dumps(state | change)
        sealed(source, lambda folder, forged=forged: (folder / "state.json").write_text(forged))
        with pytest.raises(DamagedError, match=r"state\.json is not (that of a run|one of ours)"):
            read_run(source)
    sealed(source, lambda folder: (folder / "state.json").write_text(json.dumps(state)))
    assert read_run(source) == state


@pytest.mark.parametrize(
    "saved_at",
    [10**400, math.inf, -math.inf, math.nan, 1e18, -1, "soon", None, [1]],
    ids=lambda saved_at: str(saved_at)[:5],
)
def test_a_time_that_is_none_is_in_nobodys_way(tmp_path: Path, saved_at: Any) -> None:
    """It counts as that of the files, and the next checkpoint is the newest."""
    save_value(tmp_path, 1.0)
    old = tmp_path / "step_00000004"
    state = json.dumps(read_state(old) | {"saved_at": saved_at})
    sealed(old, lambda folder: (folder / "state.json").write_text(state))
    os.utime(old / "state.json", (1000, 1000))
    save_value(tmp_path, 2.0, step=3)
    assert saved_value(tmp_path) == 2.0
    assert read_state(tmp_path / "step_00000003")["saved_at"] == pytest.approx(time.time(), abs=60)
    assert remove_old(tmp_path, keep_last=1, keep_every=None) == []
    assert not old.exists()
