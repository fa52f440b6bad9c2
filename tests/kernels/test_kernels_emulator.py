"""Tests of the emulator: every kind of kernel error is detected, and reported with its kind and line."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatronish.ops.build import build_emulated

SOURCE = Path(__file__).with_name("planted_bugs.cu")
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="the emulator is compiled by g++, which is not here"
)

# kernel -> how its finding begins, whatever the order of lanes
KINDS = {
    "missing_barrier": "race: ",
    "missing_barrier_before_reuse": "race: ",
    "missing_warp_barrier": "race: reads static shared memory, which thread ",
    "race_between_blocks": "race: writes scratch, which thread ",
    "off_by_one": "out of bounds: reads 4 bytes at byte 512 of in, which has 512",
    "off_by_one_below": "out of bounds: writes 4 bytes at byte -4 of out, which has 512",
    "shared_memory_too_small": "out of bounds: writes 4 bytes at byte ",
    "misaligned_vector": "misaligned: reads 16 bytes at byte ",
    "uninitialised_shared": "uninitialised read: nobody has written this byte of static shared memory",
    "uninitialised_scratch": "uninitialised read: nobody has written this byte of scratch",
    "write_to_an_input": "write to an input: in",
    "early_exit_before_a_barrier": "early exit: thread 63 has returned, and __syncthreads",
    "early_exit_before_a_shuffle": "early exit: lane 5 has returned, and __shfl_xor_sync",
    "divergent_shuffle": "divergent warp call: __shfl_xor_sync",
    "divergent_barrier": "divergent barrier: __syncthreads",
    "deadlock": "deadlock: thread 0 in __syncthreads",
    "lane_outside_its_mask": "lane outside its mask: __shfl_xor_sync",
    "shuffle_from_outside_the_mask": "lane outside the mask: __shfl_xor_sync",
}
ORDERS = {"ascending": (0, 0), "descending": (1, 0), "random": (2, 7)}


@pytest.fixture(scope="module")
def planted() -> ctypes.CDLL:
    return ctypes.CDLL(str(build_emulated([SOURCE], bindings=False)))


def finding_of(planted: ctypes.CDLL, bug: str, order: str = "ascending") -> tuple[str, Tensor, Tensor]:
    planted.emulator_set_order(ctypes.c_int(ORDERS[order][0]), ctypes.c_ulonglong(ORDERS[order][1]))
    given, out, scratch = torch.arange(128, dtype=torch.float32), torch.zeros(128), torch.zeros(128)
    text = ctypes.create_string_buffer(4096)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (given, out, scratch))
    planted.run_planted_bug(bug.encode(), *pointers, text, ctypes.c_size_t(len(text)))
    return text.value.decode(), given, out


def line_of(bug: str) -> str:
    (number,) = [n for n, line in enumerate(SOURCE.read_text().splitlines(), 1) if line.endswith(f"// {bug}")]
    return f"{SOURCE.name}:{number}"


@pytest.mark.parametrize("order", ORDERS)
def test_a_kernel_without_a_bug_is_left_alone(planted: ctypes.CDLL, order: str) -> None:
    finding, given, out = finding_of(planted, "no_bug", order)
    assert not finding
    sums = given.view(2, 64).roll(-1, 1).reshape(2, 2, 32).sum(-1)
    assert torch.equal(out.view(2, 64), sums.amax(-1, keepdim=True).expand(2, 64))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bug", KINDS)
def test_a_planted_bug_is_named_by_kind_line_and_kernel(planted: ctypes.CDLL, bug: str, order: str) -> None:
    finding, *_ = finding_of(planted, bug, order)
    assert finding.startswith(KINDS[bug])
    assert line_of(bug) in finding
    assert finding.endswith(f"kernel {bug}")


def test_both_sides_of_a_race_are_named(planted: ctypes.CDLL) -> None:
    finding, *_ = finding_of(planted, "race_between_blocks")
    where = line_of("race_between_blocks")
    assert finding.startswith(
        f"race: writes scratch, which thread 0 of another block wrote at {where} with no barrier between, at {where}, "
        "block (1, 0, 0), thread (0, 0, 0)"
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_that_nobody_writes_is_found_at_the_end(planted: ctypes.CDLL, order: str) -> None:
    finding, *_ = finding_of(planted, "unwritten_row", order)
    assert finding == "never written: byte 256 of out, which has 512"


@pytest.mark.parametrize(
    ("bug", "why"),
    [
        ("too_many_threads", "more than 1024 threads in a block"),
        ("too_much_shared_memory", "50000 bytes of shared memory, more than 48 KB"),
    ],
)
def test_an_invalid_launch_is_refused_with_its_line(planted: ctypes.CDLL, bug: str, why: str) -> None:
    finding, *_ = finding_of(planted, bug)
    assert finding.startswith(f"invalid launch: {why}: grid (2, 1, 1), block (")
    assert f"{SOURCE.name}:" in finding and finding.endswith(bug)


def test_a_wrong_mask_is_seen_in_the_result_alone(planted: ctypes.CDLL) -> None:
    finding, given, out = finding_of(planted, "wrong_mask")
    assert not finding
    assert not torch.equal(out.view(4, 32), given.view(4, 32).tril())
