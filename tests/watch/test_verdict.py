"""Tests of verdicts: from beats of all ranks to the rank that hangs. No process is started."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatronish.core.layout import Layout
from megatronish.watch.hang_diagnosis import RanksSeen, RankWords, verdict
from megatronish.watch.heartbeat import Beat, Collective, FolderBoard, ThreadBeat, beat_of
from megatronish.watch.observer import HangLimits

TP, DP, WORLD = "tp:0+2", "dp:0+2", "world:0+4"
MEMBERS = {TP: [0, 1], DP: [0, 2], "tp:2+2": [2, 3], "dp:1+2": [1, 3], WORLD: [0, 1, 2, 3]}
WORDS = RankWords(Layout(dp=2, tp=2), host="vm")


def entry(line: str, number: int, operation: str = "all_reduce", **others: Any) -> Collective:
    name = line.partition(":")[0]
    return Collective(line, name, number, operation, [4], "float32", seconds=41.0, **others)


def beat(
    rank: int, waiting: Collective | None = None, *, phase: str = "step", idle: float = 41.0, **others: Any
) -> Beat:
    """A rank that has waited 41 s in a collective, or has been somewhere else for so long."""
    members = {line: ranks for line, ranks in MEMBERS.items() if rank in ranks}
    lines = dict.fromkeys(members, 10)
    if waiting is not None and waiting.peer is None:
        lines[waiting.line] = waiting.number
    lines |= others.pop("lines", {})
    thread = ThreadBeat("main", phase, "", idle, 30.0, waiting, ["loader.py:5 read"], others.pop("in_torch", ""))
    threads = [thread, *others.pop("more", [])]
    return Beat(rank, 7, "vm", 100 + rank, "", 5, threads, lines, members=members, **others)


def seen(*beats: Beat, silent: tuple[int, ...] = (), size: int = 4) -> RanksSeen:
    return RanksSeen(size, {each.rank: each for each in beats}, dict.fromkeys(silent, 12.0))


def test_who_waits_for_a_waiting_rank_waits_for_what_that_one_waits_for() -> None:
    """0 waits for 1 over tp, 1 for 3 over dp, and 3 reads data, as does nobody else."""
    found = seen(
        beat(0, entry(TP, 11)),
        beat(1, entry("dp:1+2", 11)),
        beat(2, entry("tp:2+2", 11)),
        beat(3, None, phase="data"),
    )
    (culprit,) = verdict(found)
    assert (culprit.rank, culprit.kind) == (3, "outside")
    assert WORDS.report([culprit], found) == (
        "rank 3 (tp 1, dp 1) has not entered all_reduce 11 of dp for 41 s; the others wait there. It is waiting for "
        "the data of step 5. Its stack: loader.py:5 read"
    )


def test_a_rank_that_is_still_at_work_is_no_reason_to_end_the_run() -> None:
    waiting = [beat(rank, entry(WORLD, 11)) for rank in (0, 1, 2)]
    assert verdict(seen(*waiting, beat(3, None, idle=2.0))) == []
    assert [each.rank for each in verdict(seen(*waiting, beat(3, None)))] == [3]


def test_silent_ranks_are_named_and_none_of_those_that_wait() -> None:
    waiting = [beat(rank, entry(WORLD, 11)) for rank in (0, 1)]
    found = seen(*waiting, beat(2, idle=0.1), beat(3, idle=0.1), silent=(2, 3))
    assert [(each.rank, each.kind) for each in verdict(found)] == [(2, "silent"), (3, "silent")]
    assert "rank 2 (tp 0, dp 1) has not entered all_reduce 11 of world for 41 s" in WORDS.report(verdict(found), found)


def test_a_rank_that_has_entered_and_is_silent_is_named_too() -> None:
    found = seen(*(beat(rank, entry(WORLD, 11)) for rank in range(4)), silent=(1,))
    (culprit,) = verdict(found)
    assert culprit.rank == 1
    assert WORDS.report([culprit], found).startswith("rank 1 (tp 1, dp 0) is silent for 12 s: process 101 on vm ")


def test_a_rank_stopped_as_its_save_began_was_last_seen_where_its_main_thread_was() -> None:
    """Its last beat is older than the thread in which the others wait."""
    saving = ThreadBeat("save", "save", "step 4, in the background", 41.0, 30.0, entry(WORLD, 11))
    found = seen(*(beat(rank, more=[saving]) for rank in (0, 1, 2)), beat(3, idle=0.1), silent=(3,))
    (culprit,) = verdict(found, thread="save")
    assert (culprit.rank, culprit.kind) == (3, "silent")
    assert "It was last seen in step 5. Its stack: loader.py:5 read" in WORDS.report([culprit], found)


def test_a_rank_that_has_ended_is_named_if_others_wait_for_it() -> None:
    found = seen(*(beat(rank, entry(WORLD, 11)) for rank in (0, 1, 2)), beat(3, ended="ended with status 0"))
    assert WORDS.report(verdict(found), found) == (
        "rank 3 (tp 1, dp 1) has ended with status 0 and has not entered all_reduce 11 of world; the others wait there "
        "for 41 s"
    )


def test_a_rank_that_never_came_is_named() -> None:
    found = seen(*(beat(rank, entry(WORLD, 11)) for rank in (0, 1, 3)))
    (culprit,) = verdict(found)
    assert WORDS.report([culprit], found) == (
        "rank 2 (tp 0, dp 1) has been silent since its first moment and has not entered all_reduce 11 of world; the "
        "others wait there for 41 s; look for its process and its log"
    )
    assert "rank 2 (tp 0, dp 1) has not come to the run at all;" in WORDS.report([replace(culprit, lacks=None)], found)


def test_ranks_that_wait_for_each_other_are_all_named() -> None:
    found = seen(
        beat(0, entry(TP, 11)),
        beat(1, entry("dp:1+2", 11)),
        beat(2, entry(DP, 11)),
        beat(3, entry("tp:2+2", 11)),
    )
    assert sorted(each.rank for each in verdict(found)) == [0, 1, 2, 3]
    assert WORDS.report(verdict(found), found).startswith(
        "ranks do different things and wait for each other for 41 s: "
    )


def test_a_transfer_that_does_not_end_is_named_where_all_have_entered_it() -> None:
    found = seen(*(beat(rank, entry(WORLD, 11)) for rank in range(4)))
    assert WORDS.report(verdict(found), found).startswith(
        "all_reduce 11 of world has been entered by all of its ranks and does not end for 41 s: the network between"
    )


def test_a_transfer_that_a_rank_has_entered_late_may_still_end() -> None:
    """That rank may be at work inside of it, as in the writing of a checkpoint, which shows when it pauses."""
    others = [beat(rank, entry(WORLD, 11)) for rank in range(3)]
    assert verdict(seen(*others, beat(3, entry(WORLD, 11), idle=0.2))) == []
    assert [each.rank for each in verdict(seen(*others, beat(3, None, idle=31.0, lines={WORLD: 11})))] == [3]
    assert len(verdict(seen(*others, beat(3, entry(WORLD, 11), idle=31.0)))) == 4


def test_a_rank_in_a_collective_of_torch_for_which_others_wait_is_named() -> None:
    """Nobody else is in it: what is known is that the others wait for that rank."""
    odd = beat(3, None, phase="hook", in_torch="all_reduce", lines={WORLD: 10})
    found = seen(*(beat(rank, entry(WORLD, 11)) for rank in range(3)), odd)
    assert [(each.rank, each.kind) for each in verdict(found)] == [(3, "outside")]
    assert WORDS.report(verdict(found), found).startswith("rank 3 (tp 1, dp 1) has not entered all_reduce 11 of world")
    alone = seen(*(beat(rank, None, in_torch="all_reduce") for rank in range(4)))
    assert WORDS.report(verdict(alone)[:1], alone).startswith(
        "torch's all_reduce of which no record is kept does not end for 41 s: the network between them, or the "
        "backend, hangs, or a rank has not entered it. rank 0 (tp 0, dp 0) waits there"
    )


def test_different_operations_under_one_number_are_named_by_the_minority() -> None:
    usual = {WORLD: [entry(WORLD, 10), entry(WORLD, 11)]}
    odd = {WORLD: [entry(WORLD, 10), entry(WORLD, 11, "all_gather")]}
    found = seen(*(beat(rank, entry(WORLD, 12), recent=odd if rank == 2 else usual) for rank in range(4)))
    (culprit,) = verdict(found)
    assert (culprit.rank, culprit.kind) == (2, "different")
    assert WORDS.report([culprit], found).startswith(
        "ranks do different things: in collective 11 of world rank 2 (tp 0, dp 1) entered all_gather of [4] float32, "
        "and rank 0 (tp 0, dp 0) all_reduce of [4] float32"
    )


def test_pieces_of_an_uneven_exchange_may_differ() -> None:
    rows = [entry(WORLD, 11, "all_to_all_rows"), replace(entry(WORLD, 11, "all_to_all_rows"), shape=[9])]
    found = seen(*(beat(rank, recent={WORLD: [rows[rank % 2]]}, idle=1.0) for rank in range(4)))
    assert verdict(found) == []


def test_a_main_thread_that_waits_for_a_save_points_to_the_thread_that_saves() -> None:
    saving = ThreadBeat("save", "save", "step 4, in the background", 41.0, 30.0, entry(WORLD, 3))
    waits = [beat(rank, None, phase="save", more=[saving], lines={WORLD: 3}) for rank in (0, 1, 2)]
    waits = [replace(each, threads=[replace(each.threads[0], helper_stack=["x"]), saving]) for each in waits]
    found = seen(*waits, beat(3, None, phase="data", lines={WORLD: 2}))
    assert [each.rank for each in verdict(found)] == [3]


def test_a_save_in_the_background_is_judged_by_itself_while_its_run_goes_on() -> None:
    """The main threads are not at the same collective: one that is ahead does not wait for a rank that hangs."""
    recent, work = {TP: [entry(TP, 19), entry(TP, 20)]}, {"idle": 0.1}
    waits = ThreadBeat("save", "save", "step 4, in the background", 41.0, 30.0, entry(WORLD, 3))
    writes = replace(waits, waiting=None, stack=["disk.py:5 write"])
    others = [beat(rank, more=[waits], lines={TP: 19, WORLD: 3}, **work) for rank in (0, 2, 3)]
    ahead = beat(1, recent=recent, more=[writes], lines={TP: 20, WORLD: 3}, **work)
    (culprit,) = verdict(seen(*others, ahead), thread="save")
    assert (culprit.rank, culprit.kind) == (1, "outside")


def test_on_a_gpu_the_rank_is_named_whose_numbers_are_behind() -> None:
    recent = {WORLD: [entry(WORLD, number) for number in (9, 10, 11)]}
    ahead = [beat(rank, None, recent=recent, lines={WORLD: 11}) for rank in (0, 1, 2)]
    (culprit,) = verdict(seen(*ahead, beat(3, None, lines={WORLD: 9})))
    assert (culprit.rank, culprit.lacks and culprit.lacks.number) == (3, 10)


def test_a_beat_survives_its_text() -> None:
    original = beat(1, entry(TP, 11, peer=3), recent={TP: [entry(TP, 10)]})
    assert beat_of(original.to_json()) == original


def test_limits_follow_the_median_step_and_the_flags() -> None:
    open_limits = HangLimits.of(step=None, start=None, evaluation=None, save=None, timeout=600.0)
    assert open_limits.of_phase("step", median_step=None) == 540.0
    assert open_limits.of_phase("step", median_step=0.1) == 30.0
    assert open_limits.of_phase("data", median_step=4.0) == 80.0
    assert open_limits.of_phase("hook", median_step=100.0) == 540.0
    assert open_limits.of_phase("save", median_step=0.1) == 540.0
    given = HangLimits.of(step=5.0, start=None, evaluation=7.0, save=None, timeout=600.0)
    wanted: dict[Any, float] = {"start": 5.0, "evaluation": 7.0, "save": 5.0, "end": 5.0, "step": 5.0}
    assert {phase: given.of_phase(phase, median_step=1.0) for phase in wanted} == pytest.approx(wanted)


def test_two_threads_of_a_rank_may_put_the_same_text_at_once(tmp_path: Path) -> None:
    board = FolderBoard(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(board.put, "rank_0", f"{number}") for number in range(400)]:
            done.result()
    assert board.get("rank_0") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0"]
