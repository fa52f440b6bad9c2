"""Tests of tensors on a disk: what is read ahead and written behind is what was there, and no memory holds it all."""

import errno
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from paths import ROOT

from megatronish.core.control_groups import GROUPS, OWN, _groups
from megatronish.core.errors import RunError
from megatronish.parallel import disk
from megatronish.parallel.disk import DiskFile, chunks_of, copy_between, disk_of, in_chunks, in_memory, pieces_of
from megatronish.parallel.pinned import Form

SIZES = (5000, 1, 4096, 100, 2048, 0, 10_000)


@pytest.fixture
def small_chunks() -> Iterator[None]:
    with patch.multiple(disk, CHUNK=2048, REQUEST=4096):
        yield


def test_chunks_cut_at_multiples_of_their_size_and_hold_every_element_once(small_chunks: None) -> None:
    chunks = chunks_of(SIZES)
    assert all(sum(part.end - part.begin for part in chunk) <= 2048 for chunk in chunks)
    parts = [part for chunk in chunks for part in chunk]
    assert all(part.begin % 2048 == 0 for part in parts)
    assert [sum(part.end - part.begin for part in parts if part.number == n) for n in range(len(SIZES))] == [*SIZES]
    assert parts == sorted(parts)


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("is_direct", [True, False])
def test_what_is_written_in_chunks_is_what_is_read(
    tmp_path: Path, small_chunks: None, depth: int, is_direct: bool
) -> None:
    """Also by who looks at the tensors themselves, before and after; and views that begin inside of a page."""
    file = DiskFile(tmp_path)
    if not is_direct:
        file.direct = None
    tensors = file.zeros([Form((size,), torch.float32) for size in SIZES])
    views = [each[3:] for each in file.zeros([Form((size + 3,), torch.float32) for size in SIZES])]
    expected = [torch.randn(size) for size in SIZES]
    for each, other, values in zip(tensors, views, expected, strict=True):
        each.copy_(values)
        other.copy_(values)
    with patch.object(disk, "DEPTH", depth):
        for times in (1, 2):
            for chunk in in_chunks(list(zip(tensors, views, strict=True)), num_written=2):
                for _, (first, second) in chunk:
                    first.mul_(2)
                    second.mul_(3)
            for each, other, values in zip(tensors, views, expected, strict=True):
                assert torch.equal(each, 2**times * values) and torch.equal(
                    in_memory(other), values * 3 * 3 ** (times - 1)
                )


def test_what_is_not_written_stays(tmp_path: Path, small_chunks: None) -> None:
    file = DiskFile(tmp_path)
    first, second = file.zeros([Form((5000,), torch.float32)] * 2)
    for chunk in in_chunks([(first, second)], num_written=1):
        for _, tensors in chunk:
            for each in tensors:
                each.fill_(7)
    assert bool((first == 7).all()) and bool((second == 0).all())


def test_tensors_in_memory_are_one_chunk_of_themselves() -> None:
    tensors = [torch.zeros(size) for size in SIZES]
    (chunk,) = in_chunks([(each,) for each in tensors], num_written=1)
    assert [each.data_ptr() for _, (each,) in chunk] == [each.data_ptr() for each in tensors]
    assert disk_of(tensors[0]) is None and in_memory(tensors[0]) is tensors[0]
    assert next(pieces_of(tensors[0])).data_ptr() == tensors[0].data_ptr()


def test_copies_go_both_ways_in_every_dtype(tmp_path: Path, small_chunks: None) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        values = torch.arange(5000).to(dtype)
        (there,) = DiskFile(tmp_path).zeros([Form((5000,), dtype)])
        copy_between([(there, values)])
        back = torch.empty_like(values)
        copy_between([(back, there)])
        assert torch.equal(back, values)


def test_a_file_has_no_name_and_its_space_is_free_once_nothing_is_in_it(tmp_path: Path) -> None:
    (tensor,) = DiskFile(tmp_path).zeros([Form((2**20,), torch.float32)])
    assert not list(tmp_path.iterdir())
    file = disk_of(tensor)
    assert file is not None and os.fstat(file.descriptor).st_blocks * 512 >= 4 * 2**20
    gone, regions = weakref.ref(file), [weakref.ref(region) for region in file.regions]
    del file
    assert gone() is not None and regions[0]() is not None
    del tensor
    assert gone() is None and regions[0]() is None


def test_a_full_disk_is_told_when_a_tensor_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        RunError, match=r"--offload-folder .* No space left on device; free space there or name another"
    ):
        DiskFile(tmp_path).zeros([Form((5,), torch.float32)])


def test_a_disk_that_fails_is_told_by_who_goes_through_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tensor,) = DiskFile(tmp_path).zeros([Form((5000,), torch.float32)])

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(RunError, match="Input/output error"):
        for _ in in_chunks([(tensor,)], num_written=1):
            pass


PROGRAM = """
import sys
from pathlib import Path
import torch
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.optim.fused import AdamW
from megatronish.optim.masters import Masters
from megatronish.parallel.disk import DiskFile
from megatronish.parallel.pinned import Form
from megatronish.parallel.sharding import Sharding

size, folder = int(sys.argv[1]), sys.argv[2]
whole = torch.zeros(size) if folder == "memory" else DiskFile(Path(folder)).zeros([Form((size,), torch.float32)])[0]
master = torch.nn.Parameter(whole)
master.grad = torch.ones(size)
masters = Masters({"w": master}, {}, {"w": Sharding((size,), role="matrix")}, {}, torch.device("cpu"))
update = AdamW(masters, OptimizerConfig())
for _ in range(2):
    update.step(learning_rate=0.5, weight_decay=0.0)
print(float(master[0]), float(master[-1]))
"""
SIZE, LIMIT = 24 * 2**20, 480 * 2**20
"""96 MiB of gradients and 288 of masters and moments; torch takes about 250."""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group with little memory."""
    for group, files in _groups(GROUPS, OWN):
        own = group / f"megatronish-test-{os.getpid()}"
        try:
            own.mkdir()
        except OSError:
            continue
        try:
            (own / files.limit).write_text(str(LIMIT))
        except OSError:
            own.rmdir()
            continue
        yield own
        own.rmdir()
        return
    pytest.skip("this process may make no control group with a limit of memory")


def test_an_update_of_more_than_the_memory_runs_within_a_limit_of_it(tmp_path: Path, limited: Path) -> None:
    def ended(where: str) -> subprocess.CompletedProcess[str]:
        def enter() -> None:
            (limited / "cgroup.procs").write_text(str(os.getpid()))

        argv = [sys.executable, "-c", PROGRAM, str(SIZE), where]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, preexec_fn=enter, check=False)

    on_disk = ended(str(tmp_path))
    assert on_disk.returncode == 0, on_disk
    assert [float(word) for word in on_disk.stdout.split()] == pytest.approx([-1, -1])
    assert ended("memory").returncode == -signal.SIGKILL
