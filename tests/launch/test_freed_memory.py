"""Freed memory is kept: large tensors that come and go cost no new pages."""

import platform
import re
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import warm_context

from megatronish.launch.libraries import MALLOC_VARIABLES, keep_freed_memory


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process that is its own: it is forked, has torch loaded and computed nothing."""
    context = warm_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        assert ours.poll(60)
        return ours.recv()
    finally:
        process.join()


def _send(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send(function(*args))


def faults(keeps: bool) -> int:
    """Page faults of five steps that allocate 32 MB four times."""
    torch.set_num_threads(1)
    assert not keeps or keep_freed_memory({})
    for _ in range(3):
        _step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        _step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _step() -> None:
    for _ in range(4):  # one size, whose freed block always fits again
        torch.ones(8 << 20)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_a_step_gets_no_new_pages() -> None:
    assert in_process(faults, True) < 500
    assert in_process(faults, False) > 10_000


@pytest.mark.parametrize("name", MALLOC_VARIABLES)
def test_a_users_own_setting_stays(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


def sizes(limit: int) -> tuple[int, int]:
    """Kilobytes that a process with 64 MB of numbers may use, and that it has in huge pages; 0 for no limit."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (1024 * limit, 1024 * limit))
    assert keep_freed_memory({})
    held = torch.ones(16 << 20)
    assert held.numel()
    return _kilobytes("status", "VmData"), _kilobytes("smaps", "AnonHugePages")


def _kilobytes(file: str, name: str) -> int:
    return sum(map(int, re.findall(rf"{name}:\s+(\d+)", Path("/proc/self", file).read_text())))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_large_blocks_lie_in_huge_pages_where_addresses_cost_nothing() -> None:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.exists() or "[never]" in switch.read_text():
        pytest.skip("this system has no huge pages")
    free, bounded = in_process(sizes, 0), in_process(sizes, 2_000_000)
    assert free[1] >= 60_000
    assert bounded[0] < 2_000_000
    assert bounded[1] < free[1]
