"""Tests of tests/support/ranks.py: many ranks inside pytest."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, _serve, is_running, run_ranks, wait_until
from torch import Tensor

from megatronish.launch.place import Place


def join(place: Place) -> None:
    if place.world_size > 1:
        dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)


def summed(place: Place, value: float) -> Tensor:
    x = torch.tensor([value + place.rank])
    join(place)
    if place.world_size > 1:
        dist.all_reduce(x)
    return x


def describe(place: Place) -> tuple[int, int, int, int, bool, int]:
    return (os.getpid(), place.rank, place.world_size, place.local_rank, dist.is_initialized(), torch.get_num_threads())


def rank_two_raises(place: Place) -> None:
    join(place)
    if place.rank == 2:
        raise ArithmeticError("two is one too many")
    dist.barrier()


def rank_one_is_killed(place: Place) -> None:
    join(place)
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def rank_zero_loiters(place: Place) -> None:
    if place.rank == 0:
        time.sleep(60)


def start_a_worker_and_die(place: Place, folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    _ours, theirs = context.Pipe()
    worker = context.Process(target=_serve, args=(theirs, folder / "stack"))
    worker.start()
    (folder / "pid").write_text(str(worker.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_back_in_order_of_rank_and_outlive_the_ranks() -> None:
    assert [x.item() for x in run_ranks(4, summed, 0.5)] == [8.0] * 4
    assert [answer[1:4] for answer in run_ranks(3, describe)] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]


def test_a_single_rank_has_no_process_group() -> None:
    run_ranks(2, summed, 0.0)
    [(_, rank, world_size, _, initialized, threads)] = run_ranks(1, describe)
    assert (rank, world_size, initialized, threads) == (0, 1, False, 1)


def test_ranks_are_kept_from_call_to_call_and_calls_are_quick() -> None:
    before = [answer[0] for answer in run_ranks(8, describe)]
    start = time.perf_counter()
    for _ in range(3):
        run_ranks(8, summed, 1.0)
    assert (time.perf_counter() - start) / 3 < 1.0  # 0.1 s on two idle cores
    assert [answer[0] for answer in run_ranks(8, describe)] == before


def test_a_rank_that_raises_ends_the_wait_of_the_others_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 2 of 4 failed:\n(.|\n)*ArithmeticError: two is one too many"):
        run_ranks(4, rank_two_raises)
    assert run_ranks(2, summed, 1.0)[0].item() == 3.0


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 of 3 failed:\nit died with exit code -9"):
        run_ranks(3, rank_one_is_killed)


def test_ranks_that_hang_are_named_with_the_place_where_they_hang() -> None:
    run_ranks(2, summed, 1.0)  # the test before ended its workers: new ones need seconds where others load the cores
    with pytest.raises(RankError, match=r"still running after 1\.5 s: rank 0 of 2\nrank 0: (.|\n)*rank_zero_loiters"):
        run_ranks(2, rank_zero_loiters, timeout=1.5)


def test_a_worker_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(1, start_a_worker_and_die, tmp_path)
    pid = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_running(pid))
