"""Freed memory is kept: large tensors that come and go cost no new pages."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from megatronish.launch.libraries import MALLOC_VARIABLES, keep_freed_memory

FAULTS = """
import resource, sys, torch
from megatronish.launch.libraries import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory({})
def step():
    for _ in range(4):  # one size, whose freed block always fits again
        torch.ones(8 << 20)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Page faults of five steps that allocate 32 MB four times."""
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_a_step_gets_no_new_pages() -> None:
    assert faults("keep") < 500
    assert faults("give") > 10_000


@pytest.mark.parametrize("name", MALLOC_VARIABLES)
def test_a_users_own_setting_stays(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


SIZES = """
import re, torch
from pathlib import Path
from megatronish.launch.libraries import keep_freed_memory
assert keep_freed_memory({})
held = torch.ones(16 << 20)
kilobytes = lambda file, name: sum(map(int, re.findall(name + r":\\s+(\\d+)", Path("/proc/self", file).read_text())))
print(kilobytes("status", "VmData"), kilobytes("smaps", "AnonHugePages"))
"""


def sizes(limit: str) -> tuple[int, int]:
    """Kilobytes that a process with 64 MB of numbers may use, and that it has in huge pages."""
    command = ["sh", "-c", f'{limit} exec "$0" -c "$1"', sys.executable, SIZES]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    return int(said[0]), int(said[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_large_blocks_lie_in_huge_pages_where_addresses_cost_nothing() -> None:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.exists() or "[never]" in switch.read_text():
        pytest.skip("this system has no huge pages")
    free, bounded = sizes(""), sizes("ulimit -d 2000000;")
    assert free[1] >= 60_000
    assert bounded[0] < 2_000_000
    assert bounded[1] < free[1]
