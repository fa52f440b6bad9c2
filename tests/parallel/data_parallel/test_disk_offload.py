"""Tests of --offload-folder: a run with it is that of the CPU offload to the bit, and its masters lie on a disk."""

import ctypes
import mmap
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from engines import evaluated, open_job, take_step
from jobs import started, steps_of, tiny, train_on_ranks
from planted_kills import kill_all_in_step
from ranks import run_ranks
from saved_runs import assert_same_bits
from sweeps import some_of
from torch import Tensor

from megatronish.engine.build import build_engine
from megatronish.estimate.disk_room import IN_MEMORY, file_system_of
from megatronish.launch.place import Place
from megatronish.optim.masters import _Stepped
from megatronish.parallel import disk
from megatronish.parallel.disk import disk_of
from megatronish.report.statistics import num_zeros, params_norm
from megatronish.train.checkpoint_state import tensors_of

LARGE = "--hidden-size 96 --ffn-hidden-size 192 --global-batch-size 4"
STEPS = 2


@pytest.fixture(autouse=True)
def local_disk(tmp_path: Path) -> None:
    """A reason to skip where temporary files lie in memory: the folder would be refused."""
    if (kind := file_system_of(tmp_path.resolve())) in IN_MEMORY:
        pytest.skip(f"{tmp_path} is on {kind}, which is no disk")


class Seen(NamedTuple):
    """What a rank has seen of a run, and its tensors of a checkpoint; how many of these lie on a disk."""

    numbers: list[float]
    evaluation: tuple[float, int]
    tensors: dict[str, Tensor]
    on_disk: int


def seen(place: Place, flags: str, depth: int = 1) -> Seen:
    """Steps, an evaluation and norms, in chunks of 2,048 elements."""
    with patch.multiple(disk, CHUNK=2048, DEPTH=depth):
        return _seen(place, flags)


def _seen(place: Place, flags: str) -> Seen:
    job = open_job(place, f"{LARGE} {flags}")
    engine = build_engine(job.config, job.mesh, vocab_size=job.vocab_size)
    numbers = []
    batch, batches = job.config.global_batch_size, job.batches_of(job.datasets.train)
    for step in range(STEPS):
        result = engine.step(batches(step * batch, batch), num_steps_done=step, learning_rate=1e-3, weight_decay=0.1)
        numbers += [result.loss, result.grad_norm, params_norm(engine), num_zeros(engine)]
    tensors = {name: each.local for name, each in tensors_of(engine, with_optimizer=True).items()}
    on_disk = sum(disk_of(tensor) is not None for tensor in tensors.values() if tensor.numel())
    return Seen(
        numbers, evaluated(engine, batches(0, batch)), {name: each.clone() for name, each in tensors.items()}, on_disk
    )


def assert_equal_to_memory(tmp_path: Path, flags: str, size: int, depth: int = 1) -> None:
    """Equality of a run on a disk and in the CPU's memory, in every bit."""
    expected = run_ranks(size, seen, flags)
    actual = run_ranks(size, seen, f"{flags} --offload-folder {tmp_path}", depth)
    for there, here in zip(expected, actual, strict=True):
        assert here.numbers == there.numbers
        assert here.evaluation == there.evaluation
        assert here.tensors.keys() == there.tensors.keys()
        for name, tensor in there.tensors.items():
            assert torch.equal(here.tensors[name], tensor), name
        assert there.on_disk == 0
        assert here.on_disk == sum(tensor.numel() > 0 for tensor in here.tensors.values())
    assert not list(tmp_path.iterdir()), "a file has a name"


OPTIMIZER, PARAMETERS = "--optimizer-cpu-offload", "--param-cpu-offload"
LAYOUTS = [
    (f"--dp 2 --zero-stage 1 {OPTIMIZER}", 2),
    (f"--dp 2 --zero-stage 2 --bf16 {OPTIMIZER}", 2),
    (f"--dp 2 --zero-stage 3 --bf16 {OPTIMIZER} --optimizer sgd", 2),
    (f"--dp 2 --zero-stage 3 {PARAMETERS}", 2),
    (f"--dp 2 --zero-stage 3 --bf16 {PARAMETERS} --optimizer muon", 2),
    (f"--dp 1 --zero-stage 3 {PARAMETERS} --bf16", 1),
    (f"--dp 1 --zero-stage 1 {OPTIMIZER} --optimizer muon", 1),
]


@pytest.mark.parametrize(
    ("flags", "size"), some_of(LAYOUTS, LAYOUTS[1:3] + LAYOUTS[4:5] + LAYOUTS[6:]), ids=[flags for flags, _ in LAYOUTS]
)
def test_a_run_on_a_disk_is_that_in_memory_to_the_bit(tmp_path: Path, flags: str, size: int) -> None:
    assert_equal_to_memory(tmp_path, flags, size)


@pytest.mark.parametrize("depth", [0, 2, 3])
def test_every_depth_of_reading_ahead_gives_the_same_bits(tmp_path: Path, depth: int) -> None:
    assert_equal_to_memory(tmp_path, f"--dp 1 --zero-stage 1 {OPTIMIZER}", 1, depth)


MORE = [
    (f"--dp 2 --tp 2 --sequence-parallel --zero-stage 2 --bf16 {OPTIMIZER} --optimizer muon", 4),
    (f"--dp 2 --pp 2 --zero-stage 1 --pipeline-schedule zb-h1 {OPTIMIZER}", 4),
    (f"--cp 2 --zero-stage 3 --bf16 {PARAMETERS} --optimizer sgd", 2),
    (f"--dp 4 --dp-replicate 2 --zero-stage 3 {PARAMETERS} --ffn-hidden-size 181", 4),
    (f"--dp 4 --dp-replicate 2 --zero-stage 1 {OPTIMIZER} --bf16", 4),
]


@pytest.mark.parametrize(("flags", "size"), some_of(MORE, MORE[:2]), ids=[flags for flags, _ in MORE])
def test_it_goes_with_every_axis(tmp_path: Path, flags: str, size: int) -> None:
    assert_equal_to_memory(tmp_path, flags, size)


# What is in memory


class InMemory(NamedTuple):
    """Bytes of a step: the most that were in memory of the file, what buffers take, what lies there, and was moved."""

    pages: int
    buffers: int
    on_disk: int
    read: int
    written: int
    chunk: int
    kept: int


def measured(place: Place, flags: str) -> InMemory:
    """A step whose optimizer looks, chunk by chunk, at what is in memory."""
    with patch.object(disk, "CHUNK", 8192):
        job = open_job(place, f"{WIDE} {flags}")
        engine = build_engine(job.config, job.mesh, vocab_size=job.vocab_size)
        take_step(job, engine, 0)
        file = disk_of(next(iter(engine.optimizer.masters.values())))
        assert file is not None
        pages, moved = list[int](), {"_read": 0, "_write": 0}
        stepped, transfers = _Stepped.step, {name: getattr(disk, name) for name in moved}

        def looking(self: _Stepped, **rates: float) -> None:
            pages.append(sum(resident(region) for region in file.regions))
            stepped(self, **rates)

        def counting(name: str) -> Callable[..., None]:
            def transfer(file: disk.DiskFile, place: int, memory: memoryview, is_direct: bool) -> None:
                moved[name] += len(memory)
                transfers[name](file, place, memory, is_direct)

            return transfer

        with patch.object(_Stepped, "step", looking), patch.multiple(disk, **{each: counting(each) for each in moved}):
            take_step(job, engine, 1)
        (ring,) = file._rings
        kept = sum(master.numel() for master in engine.optimizer.masters.values())
        return InMemory(
            max(pages), sum(map(len, ring)), sum(map(len, file.regions)), moved["_read"], moved["_write"], 8192, kept
        )


WIDE = "--hidden-size 192 --ffn-hidden-size 768 --num-layers 4"


def resident(region: mmap.mmap) -> int:
    """Bytes of a mapping that are in the system's cache."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    pages = (ctypes.c_ubyte * (len(region) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(region)), pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def test_a_step_has_three_chunks_of_masters_and_moments_in_memory(tmp_path: Path) -> None:
    """In buffers. Of the file itself no more than the last, partly filled page of a tensor is in memory."""
    flags = f"--dp 2 --zero-stage 1 {OPTIMIZER} --offload-folder {tmp_path}"
    for rank in run_ranks(2, measured, flags):
        assert rank.buffers <= 3 * 3 * 4 * rank.chunk * 1.1
        assert rank.on_disk > 15 * rank.buffers / 3
        assert rank.pages <= 0.1 * rank.on_disk, rank
        # Adam's traffic: 12 bytes of a parameter are read and written, and masters are read once more.
        assert rank.written == 12 * rank.kept
        assert rank.read == 16 * rank.kept


# Runs


def test_a_killed_run_leaves_nothing_and_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    offload = tmp_path / "disk"
    flags = f"--dp 2 --zero-stage 3 {PARAMETERS} --save-interval 1 --log-interval 1 --train-iters 4"
    train_on_ranks(tiny(tmp_path / "whole", flags), world_size=2)
    argv = tiny(tmp_path / "run", f"{flags} --offload-folder {offload}")
    with started(argv, tmp_path, plant=kill_all_in_step, plant_args=(2,)) as job:
        assert job.wait() == -signal.SIGKILL and job.is_gone(), job.told
    assert offload.is_dir() and not list(offload.iterdir())
    assert list(steps_of(tmp_path / "run")) == [1]
    train_on_ranks(argv, world_size=2)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")
    assert not list(offload.iterdir())


SAVES = ["--async-save", "--save-replicated-interval 1 --local-save {copies}", ""]


SAVED = f"--dp 2 --zero-stage 2 --bf16 {OPTIMIZER} --save-interval 1 --train-iters 4 --log-params-norm"


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in the CPU's memory."""
    folder = tmp_path_factory.mktemp("memory") / "run"
    train_on_ranks(tiny(folder, SAVED), world_size=2)
    return folder


@pytest.mark.parametrize("flags", some_of(SAVES, SAVES[:2]))
def test_its_checkpoints_are_those_of_a_run_in_memory_and_load_without_a_disk(
    tmp_path: Path, in_memory: Path, flags: str
) -> None:
    there = f"{SAVED} {flags.format(copies=tmp_path / 'copies')} --offload-folder {tmp_path / 'disk'}"
    (tmp_path / "disk").mkdir()
    train_on_ranks(tiny(tmp_path / "run", f"{there} --exit-interval 2"), world_size=2)
    for step in ("step_00000001", "step_00000002"):
        assert_same_bits(in_memory / "checkpoints" / step, tmp_path / "run" / "checkpoints" / step)
    assert list(steps_of(tmp_path / "run")) == [1, 2]
    train_on_ranks(tiny(tmp_path / "run", SAVED), world_size=2)
    assert steps_of(tmp_path / "run") == steps_of(in_memory)
